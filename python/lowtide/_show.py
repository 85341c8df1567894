"""Memory statistics as tables in a notebook."""

import html
from collections.abc import Iterable, Mapping


class MemoryStats(dict[str, int]):
    """The figures of a device, under PyTorch's keys. A notebook shows a table of the most important ones."""

    def _repr_html_(self) -> str:
        reserved, live = self._bytes("reserved"), self._bytes("requested")
        ratio = f"{reserved / live:.3f}" if live else "none live"
        rows = [
            ("live", "what the program asked for and holds", live, self._bytes("requested", "peak")),
            ("allocated", "rounding included", self._bytes("allocated"), self._bytes("allocated", "peak")),
            ("active", "and what waits for a stream", self._bytes("active"), self._bytes("active", "peak")),
            ("reserved", "held from the driver, or paused", reserved, self._bytes("reserved", "peak")),
        ]
        full = max((peak for *_, peak in rows), default=0)
        counts = {
            "reserved over live": ratio,
            "requests": f"{self.get('allocation.all.allocated', 0):,}",
            "calls to the driver": f"{self.get('num_device_alloc', 0) + self.get('num_device_free', 0):,}",
            "retries": f"{self.get('num_alloc_retries', 0):,}",
            "out of memory": f"{self.get('num_ooms', 0):,}",
        }
        return "".join(
            (
                "<table><thead><tr><th scope='col'>memory</th><th scope='col'></th>",
                "<th scope='col'>now</th><th scope='col'>at most</th><th scope='col'></th></tr></thead><tbody>",
                *(_row(*row, full) for row in rows),
                "</tbody></table><p>",
                " · ".join(f"{name} <b>{value}</b>" for name, value in counts.items()),
                "</p>",
                _regions(self),
                "<details><summary>every figure</summary><table><tbody>",
                *(f"<tr><td>{html.escape(key)}</td><td>{value:,}</td></tr>" for key, value in self.items()),
                "</tbody></table></details>",
            )
        )

    def _bytes(self, name: str, figure: str = "current") -> int:
        return self.get(f"{name}_bytes.all.{figure}", 0)


def _row(name: str, note: str, now: int, most: int, full: int) -> str:
    """Returns a row with a bar: the current value, and the peak as its outline."""
    now_width, most_width = (100 * value / full if full else 0 for value in (now, most))
    bar = (
        f"<div style='width:12em;height:0.8em;position:relative' role='img' aria-label='{now_width:.0f} percent'>"
        f"<div style='position:absolute;inset:0 auto 0 0;width:{most_width:.1f}%;border:1px solid;opacity:.4'></div>"
        f"<div style='position:absolute;inset:0 auto 0 0;width:{now_width:.1f}%;background:currentColor;opacity:.6'>"
        "</div></div>"
    )
    cells = f"<th scope='row'>{name}</th><td>{note}</td><td>{size(now)}</td><td>{size(most)}</td><td>{bar}</td>"
    return f"<tr>{cells}</tr>"


_REGION_SIZES = {
    "live": "live_bytes",
    "on the device": "mapped_bytes",
    "away": "paused_bytes",
    "in the host's memory": "host_bytes",
    "on disk": "disk_bytes",
}
_REGION_CHANGES = {
    "pauses": ("pauses", "pause_ns", "saved_bytes_per_second"),
    "resumes": ("resumes", "resume_ns", "restored_bytes_per_second"),
}


def _regions(stats: Mapping[str, int]) -> str:
    """Returns a table of the regions, or an empty text without regions."""
    tags = _tags(stats)
    if not tags:
        return ""
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("region", *_REGION_SIZES, *_REGION_CHANGES))
    rows = "".join(_region_row(tag, stats) for tag in tags)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _region_row(tag: str, stats: Mapping[str, int]) -> str:
    def figure(name: str) -> int:
        return stats.get(f"region.{tag}.{name}", 0)

    sizes = (size(figure(name)) for name in _REGION_SIZES.values())
    changes = (_changes(*map(figure, names)) for names in _REGION_CHANGES.values())
    cells = "".join(f"<td>{text}</td>" for text in (*sizes, *changes))
    return f"<tr><th scope='row'>{html.escape(tag)}</th>{cells}</tr>"


def _changes(count: int, ns: int, bytes_per_second: int) -> str:
    """Returns a text with the number of pauses or resumes, their time and their copy speed."""
    took = f" in {ns / 1e6:.1f} ms" if count else ""
    copied = f", copied at {bytes_per_second / 1e9:.1f} GB/s" if bytes_per_second else ""
    return f"{count}{took}{copied}"


def _tags(keys: Iterable[str]) -> list[str]:
    ends = (".live_bytes",)
    found = (key.removeprefix("region.") for key in keys if key.startswith("region.") and key.endswith(ends))
    return [key.removesuffix(".live_bytes") for key in found]


def size(count: int) -> str:
    """Returns a number of bytes as text, like `1.50 GiB`."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"
