// The page's data: columns of numbers behind one directory, gzipped, as base64.
//
// A column holds the differences of its values, wrapping, the first against 0, and these lie in planes: the
// lowest byte of each, then the second byte of each, and so on. That is what makes gzip good at them.

interface Entry {
  name: string;
  kind: "u32" | "u64";
  count: number;
  /** From the first byte after the directory. */
  offset: number;
  length: number;
}

/** Columns by name, each decoded when it is first asked for. */
export class Container {
  readonly #entries: Map<string, Entry>;
  readonly #bytes: Uint8Array;
  readonly #decoded = new Map<string, Uint32Array | Float64Array>();

  /** Reads the directory. Throws where the bytes are no container. */
  constructor(bytes: Uint8Array) {
    const start = 4 + new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
    const directory = JSON.parse(new TextDecoder().decode(bytes.subarray(4, start))) as { columns: Entry[] };
    this.#entries = new Map(directory.columns.map((entry) => [entry.name, entry]));
    this.#bytes = bytes.subarray(start);
    for (const { name, kind, count, offset, length } of directory.columns) {
      if (length !== count * (kind === "u32" ? 4 : 8) || offset + length > this.#bytes.length) {
        throw new Error(`the report's data is cut off or damaged: column ${name}`);
      }
    }
  }

  has(name: string): boolean {
    return this.#entries.has(name);
  }

  /** Returns a column of 32-bit numbers; an empty one if there is none of that name. */
  u32(name: string): Uint32Array {
    return this.#column(name, "u32", decodeU32, new Uint32Array(0));
  }

  /** Returns a column of whole numbers below 2^53; an empty one if there is none of that name. */
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
    const column = decode(this.#bytes.subarray(entry.offset, entry.offset + entry.length), entry.count);
    this.#decoded.set(name, column);
    return column;
  }
}

/** Returns the container that the text of the page's data element holds. */
export async function unpack(base64: string): Promise<Container> {
  const packed = new Blob([bytesOfBase64(base64)]);
  const stream = packed.stream().pipeThrough(new DecompressionStream("gzip"));
  return new Container(new Uint8Array(await new Response(stream).arrayBuffer()));
}

function bytesOfBase64(text: string): Uint8Array<ArrayBuffer> {
  // Newer than TypeScript's library for this target, and five times faster than what follows.
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
