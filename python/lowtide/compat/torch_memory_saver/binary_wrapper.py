"""The functions `tms_*` of liblowtide.so."""

from typing import TypedDict

from ..._library import PATH, library


class Config(TypedDict):
    """What a thread's requests are to be."""

    tag: str
    interesting_region: bool
    enable_cpu_backup: bool
    cpu_backup_backend: str | None
    enable_disk_backup: bool


class BinaryWrapper:
    """The library, as `cdll`, with what each of its functions takes. Wherever it is said to be, there is one."""

    def __init__(self, path_binary: str = str(PATH)) -> None:
        self.cdll = library()

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Says what this thread's requests are from now on."""
        # Out of any region first: a region of the new tag with the old backup is nobody's.
        self.cdll.tms_set_interesting_region(False)
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
        self.cdll.tms_set_interesting_region(interesting_region)

    def get_config(self) -> Config:
        """Returns what this thread's requests are."""
        return {
            "tag": self.cdll.tms_get_current_tag().decode(),
            "interesting_region": self.cdll.tms_get_interesting_region(),
            "enable_cpu_backup": self.cdll.tms_get_enable_cpu_backup(),
            "cpu_backup_backend": self.cdll.tms_get_cpu_backup_backend().decode(),
            "enable_disk_backup": self.cdll.tms_get_enable_disk_backup(),
        }
