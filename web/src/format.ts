// Numbers as text for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Returns bytes with up to four digits: "1.531 GiB", "-20 MiB", "512 B". */
export function bytes(value: number): string {
  const size = Math.abs(value);
  let unit = 0;
  while (unit < UNITS.length - 1 && size >= 1024 ** (unit + 1)) unit++;
  const scaled = size / 1024 ** unit;
  const fraction = scaled < 10 ? 3 : scaled < 100 ? 2 : scaled < 999.95 ? 1 : 0;
  const digits = unit === 0 || Number.isInteger(scaled) ? 0 : fraction;
  return `${value < 0 ? "−" : ""}${scaled.toFixed(digits)} ${UNITS[unit]}`;
}

/** Returns a change of bytes with its sign. */
export function change(value: number): string {
  return value > 0 ? `+${bytes(value)}` : bytes(value);
}

/** Returns a whole number with separated thousands. */
export function whole(value: number): string {
  return WHOLE.format(value);
}

/** Returns a share in percent: "45.7 %". Only 0 is "0.0 %". Returns "–" if it is not finite. */
export function percent(share: number): string {
  if (share > 0 && share < 0.0005) return "< 0.1 %";
  return Number.isFinite(share) ? `${(share * 100).toFixed(1)} %` : "–";
}

/** The words for shares, each with the least share that it stands for. */
const SHARES: readonly (readonly [number, string])[] = [
  [1, "all"],
  [0.9, "almost all"],
  [0.6, "most"],
  [0.4, "about half"],
  [0.29, "about a third"],
  [0.225, "about a quarter"],
  [0.15, "about a fifth"],
  [0.08, "about a tenth"],
  [0.02, "a small part"],
  [Number.MIN_VALUE, "almost none"],
];

/** Returns a share in words: "about a third". */
export function share(value: number): string {
  return wordOf(SHARES, value) ?? "none";
}

const CONFIDENCES: readonly (readonly [number, string])[] = [
  [0.95, "almost certain"],
  [0.8, "very likely"],
  [0.6, "likely"],
  [0.4, "as likely as not"],
];

/** Returns a confidence in words: "almost certain". */
export function confidence(value: number): string {
  return wordOf(CONFIDENCES, value) ?? "unlikely";
}

function wordOf(words: typeof SHARES, value: number): string | undefined {
  return words.find(([least]) => value >= least)?.[1];
}

/** Returns a ratio with three decimals. Returns "–" if it is not finite. */
export function ratio(value: number): string {
  return Number.isFinite(value) ? value.toFixed(3) : "–";
}

/** Returns a duration: "812 µs", "3.214 s", "2 min 5 s". */
export function duration(microseconds: number): string {
  const value = Math.abs(microseconds);
  if (value < 1000) return `${Math.round(microseconds)} µs`;
  if (value < 1e6) return `${(microseconds / 1e3).toPrecision(3)} ms`;
  if (value < 6e7) return `${(microseconds / 1e6).toPrecision(4)} s`;
  const seconds = Math.round(value / 1e6);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${seconds % 60} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

/** Returns a time in seconds with the digits that multiples of an increment need. Both are in microseconds. */
export function seconds(microseconds: number, increment: number): string {
  const digits = Math.max(0, 6 - Math.floor(Math.log10(increment)));
  return `${(microseconds / 1e6).toFixed(digits)} s`;
}

export function address(value: number): string {
  return `0x${value.toString(16)}`;
}

/** Returns the size class between two powers of two: "1 MiB to 2 MiB". */
export function sizeClass(exponent: number): string {
  return `${bytes(2 ** exponent)} to ${bytes(2 ** (exponent + 1))}`;
}

/** Returns a count with its noun: "1 block", "12 blocks" or "7 strategies". */
export function counted(count: number, noun: string): string {
  return `${whole(count)} ${count === 1 ? noun : noun.endsWith("y") ? `${noun.slice(0, -1)}ies` : `${noun}s`}`;
}

/** Returns the words of a name in the data: "optimizer state" of `optimizer_state`. */
export function words(name: string): string {
  return name.replaceAll("_", " ");
}

/** Returns a text with its first letter capitalized. */
export function capital(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}
