// The page's data: a directory and columns of numbers, compressed with gzip and encoded as base64.
//
// A column stores the wrapping differences between consecutive values, the first relative to 0. It stores the lowest
// byte of every difference, then the second byte of every one, and so on. gzip compresses this well.
//
// Columns with a number for each block make up most of the data. They come last, so that curves can be drawn before
// these columns are decompressed.

interface Entry {
  name: string;
  kind: "u32" | "u64";
  count: number;
  /** The distance from the first byte after the directory. */
  offset: number;
  length: number;
}

/** Matches the names of the columns of blocks, listed or aggregated. These columns come last. */
const OF_BLOCKS = /^\d+\/(blocks|folded)\//;

/** The columns by name. A column is decoded when it is first read. */
export class Container {
  readonly #entries: Map<string, Entry>;
  readonly #bytes: Uint8Array;
  /** The number of bytes that have arrived. */
  #arrived: number;
  readonly #decoded = new Map<string, Uint32Array | Float64Array>();

  /**
   * Creates a container over `bytes`, which has room for all columns. Only its first `arrived` bytes are set yet.
   * Throws if a column in the directory does not fit.
   */
  constructor(directory: Entry[], bytes: Uint8Array, arrived = bytes.length) {
    this.#entries = new Map(directory.map((entry) => [entry.name, entry]));
    this.#bytes = bytes;
    this.#arrived = arrived;
    for (const { name, kind, count, offset, length } of directory) {
      if (length !== count * (kind === "u32" ? 4 : 8) || offset + length > bytes.length) {
        throw new Error(`the report's data is cut off or damaged: column ${name}`);
      }
    }
  }

  get isWhole(): boolean {
    return this.#arrived === this.#bytes.length;
  }

  /** Returns whether all columns except those of blocks have arrived. */
  get hasCurves(): boolean {
    const curves = [...this.#entries.values()].filter(({ name }) => !OF_BLOCKS.test(name));
    return curves.every(({ offset, length }) => offset + length <= this.#arrived);
  }

  /** Adds the next bytes to those that have arrived. */
  add(bytes: Uint8Array): void {
    this.#bytes.set(bytes, this.#arrived);
    this.#arrived += bytes.length;
  }

  /** Returns the number of values in a column, even if they have not arrived; 0 if there is no such column. */
  count(name: string): number {
    return this.#entries.get(name)?.count ?? 0;
  }

  has(name: string): boolean {
    return this.#entries.has(name);
  }

  /** Returns a column of 32-bit numbers; empty if there is no such column. */
  u32(name: string): Uint32Array {
    return this.#column(name, "u32", decodeU32, new Uint32Array(0));
  }

  /** Returns a column of whole numbers below 2^53; empty if there is no such column. */
  u64(name: string): Float64Array {
    return this.#column(name, "u64", decodeU64, new Float64Array(0));
  }

  #column<T extends Uint32Array | Float64Array>(
    name: string,
    kind: Entry["kind"],
    decode: (planes: Uint8Array, count: number) => T,
    empty: T,
  ): T {
    const known = this.#decoded.get(name);
    if (known !== undefined) return known as T;
    const entry = this.#entries.get(name);
    if (entry === undefined) return empty;
    if (entry.kind !== kind) throw new Error(`column ${name} is ${entry.kind}, expected ${kind}`);
    if (entry.offset + entry.length > this.#arrived) throw new Error(`column ${name} is not there yet`);
    const column = decode(this.#bytes.subarray(entry.offset, entry.offset + entry.length), entry.count);
    this.#decoded.set(name, column);
    return column;
  }
}

/** A container, and a function that decompresses the rest of its data. */
export interface Unpacking {
  container: Container;
  rest: () => Promise<void>;
}

/** Decompresses the text of the page's data element at least as far as curves need it. */
export async function unpack(base64: string): Promise<Unpacking> {
  const packed = new Blob([bytesOfBase64(base64)]);
  const reader = packed.stream().pipeThrough(new DecompressionStream("gzip")).getReader();
  const container = await beginning(reader);
  const readUntil = async (isEnough: () => boolean) => {
    while (!isEnough()) container.add(await next(reader));
  };
  await readUntil(() => container.hasCurves);
  return { container, rest: () => readUntil(() => container.isWhole) };
}

/** Reads the directory. Bytes that arrive together with it are added to the container. */
async function beginning(reader: ReadableStreamDefaultReader<Uint8Array>): Promise<Container> {
  let bytes = new Uint8Array(0);
  const readTo = async (length: number) => {
    while (bytes.length < length) {
      const more = await next(reader);
      const longer = new Uint8Array(bytes.length + more.length);
      longer.set(bytes);
      longer.set(more, bytes.length);
      bytes = longer;
    }
  };
  await readTo(4);
  const start = 4 + new DataView(bytes.buffer).getUint32(0, true);
  await readTo(start);
  const text = new TextDecoder().decode(bytes.subarray(4, start));
  const { columns } = JSON.parse(text) as { columns: Entry[] };
  const length = columns.reduce((most, { offset, length }) => Math.max(most, offset + length), 0);
  const container = new Container(columns, new Uint8Array(length), 0);
  container.add(bytes.subarray(start));
  return container;
}

async function next(reader: ReadableStreamDefaultReader<Uint8Array>): Promise<Uint8Array> {
  const { done, value } = await reader.read();
  if (done) throw new Error("the report's data is cut off");
  return value;
}

function bytesOfBase64(text: string): Uint8Array<ArrayBuffer> {
  // TypeScript's library for this target does not have `fromBase64`. It is five times faster than the loop below.
  const native = Uint8Array as unknown as { fromBase64?: (text: string) => Uint8Array<ArrayBuffer> };
  if (native.fromBase64 !== undefined) return native.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

function decodeU32(planes: Uint8Array, count: number): Uint32Array {
  const values = new Uint32Array(count);
  let value = 0;
  for (let i = 0; i < count; i++) {
    const difference =
      planes[i] | (planes[count + i] << 8) | (planes[2 * count + i] << 16) | (planes[3 * count + i] << 24);
    value = (value + difference) | 0;
    values[i] = value;
  }
  return values;
}

function decodeU64(planes: Uint8Array, count: number): Float64Array {
  const values = new Float64Array(count);
  let low = 0;
  let high = 0;
  for (let i = 0; i < count; i++) {
    low +=
      (planes[i] |
        (planes[count + i] << 8) |
        (planes[2 * count + i] << 16) |
        (planes[3 * count + i] << 24)) >>>
      0;
    const carry = low > 0xffffffff ? 1 : 0;
    low >>>= 0;
    high =
      (high +
        carry +
        ((planes[4 * count + i] |
          (planes[5 * count + i] << 8) |
          (planes[6 * count + i] << 16) |
          (planes[7 * count + i] << 24)) >>>
          0)) >>>
      0;
    values[i] = high * 0x100000000 + low;
  }
  return values;
}
