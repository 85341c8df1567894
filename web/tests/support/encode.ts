// Makes the page's data from plain objects: the opposite of src/data/container.ts, written from the format's
// description and not from that file.

import { gzipSync } from "node:zlib";
import { Container } from "../../src/data/container.ts";

export type Values = { kind: "u32" | "u64"; values: ArrayLike<number> };

/** Returns the container's bytes, not compressed. */
export function container(columns: Record<string, Values>): Uint8Array {
  const parts: Uint8Array[] = [];
  let offset = 0;
  const directory = Object.entries(columns).map(([name, { kind, values }]) => {
    const bytes = kind === "u32" ? planes(values, 4, 2 ** 32) : planes64(values);
    parts.push(bytes);
    const entry = { name, kind, count: values.length, offset, length: bytes.length };
    offset += bytes.length;
    return entry;
  });
  const text = new TextEncoder().encode(JSON.stringify({ columns: directory }));
  const length = new Uint8Array(4);
  new DataView(length.buffer).setUint32(0, text.length, true);
  return Buffer.concat([length, text, ...parts]);
}

/** Returns what the page reads such bytes as, of which all or only the first may be there. */
export function opened(bytes: Uint8Array, arrived?: number): Container {
  const start = 4 + new DataView(bytes.buffer, bytes.byteOffset).getUint32(0, true);
  const { columns } = JSON.parse(new TextDecoder().decode(bytes.subarray(4, start)));
  return new Container(columns, bytes.slice(start), arrived);
}

/** Returns what stands in the page: base64 of gzip of the container. */
export function pack(columns: Record<string, Values>): string {
  return gzipSync(container(columns)).toString("base64");
}

function planes(values: ArrayLike<number>, width: number, modulus: number): Uint8Array {
  const bytes = new Uint8Array(values.length * width);
  let before = 0;
  for (let i = 0; i < values.length; i++) {
    const difference = (values[i] - before + modulus) % modulus;
    before = values[i];
    for (let plane = 0; plane < width; plane++) {
      bytes[plane * values.length + i] = Math.floor(difference / 256 ** plane) % 256;
    }
  }
  return bytes;
}

function planes64(values: ArrayLike<number>): Uint8Array {
  const bytes = new Uint8Array(values.length * 8);
  let before = 0;
  for (let i = 0; i < values.length; i++) {
    // A negative difference wraps: both halves of its two's complement.
    const difference = values[i] - before;
    before = values[i];
    const high = Math.floor(difference / 2 ** 32);
    const low = difference - high * 2 ** 32;
    for (let plane = 0; plane < 4; plane++) {
      bytes[plane * values.length + i] = (low / 256 ** plane) & 255;
      bytes[(plane + 4) * values.length + i] = (high >> (8 * plane)) & 255;
    }
  }
  return bytes;
}
