// A PyTorch memory snapshot of a made-up job, as a pickle: what `lowtide` itself reads.

const SEGMENT = 0x7f00_0000_0000;
const SEGMENT_BYTES = 2 ** 31;
const MIB = 2 ** 20;

type Value = null | number | string | Value[] | { [key: string]: Value };

/** What a leak's blocks were asked for by: no code of the job's own. */
const LIBRARY: Value = {
  name: "append",
  filename: "/usr/lib/python3.12/site-packages/history/log.py",
  line: 3,
};

/** Returns a job of 20 steps of 100 requests, each of which keeps one more block of `leakBytes`. */
export function leakingJob(leakBytes: number, hasStacks: boolean): Uint8Array {
  const events: Value[] = [];
  const frame = (name: string, line: number): Value => ({ name, filename: "train.py", line });
  const push = (action: string, address: number, size: number, frames: Value[]) =>
    events.push({
      action,
      addr: address,
      size,
      stream: 0,
      time_us: 1e15 + 10 * events.length,
      ...(hasStacks ? { frames } : {}),
    });
  const leak = [LIBRARY, frame("keep_history", 77), frame("main", 1)];
  const held: number[] = [];
  push("segment_alloc", SEGMENT, SEGMENT_BYTES, []);
  for (let step = 0; step < 20; step++) {
    const requests = Array.from({ length: 100 }, (_, i) => ({
      address: SEGMENT + i * MIB,
      size: 4096 * (i + 1),
      frames: [frame("forward", i), frame("main", 2)],
    }));
    for (const { address, size, frames } of requests) push("alloc", address, size, frames);
    const address = SEGMENT + (200 + 4 * step) * MIB;
    push("alloc", address, leakBytes, leak);
    held.push(address);
    for (const { address, size } of requests.reverse()) {
      push("free_requested", address, size, []);
      push("free_completed", address, size, []);
    }
  }
  const size = Math.ceil(leakBytes / 512) * 512;
  const blocks: Value[] = [];
  let free = SEGMENT;
  // The blocks of a segment cover it.
  const pass = (to: number) =>
    blocks.push({ address: free, size: to - free, requested_size: 0, state: "inactive" });
  for (const address of held) {
    pass(address);
    blocks.push({ address, size, requested_size: leakBytes, state: "active_allocated", frames: leak });
    free = address + size;
  }
  pass(SEGMENT + SEGMENT_BYTES);
  const segment = {
    device: 0,
    address: SEGMENT,
    total_size: SEGMENT_BYTES,
    allocated_size: held.length * size,
    active_size: held.length * size,
    requested_size: held.length * leakBytes,
    stream: 0,
    segment_type: "large",
    blocks,
  };
  return pickle({ segments: [segment], device_traces: [events], allocator_settings: {} });
}

/** Returns a value in Python's pickle format, version 2. */
function pickle(value: Value): Uint8Array {
  const parts: Uint8Array[] = [];
  const opcode = (code: string) => parts.push(Buffer.from(code, "latin1"));
  const put = (value: Value): void => {
    if (value === null) opcode("N");
    else if (typeof value === "number") {
      opcode("\x8a\x08");
      const bytes = Buffer.alloc(8);
      bytes.writeBigInt64LE(BigInt(value));
      parts.push(bytes);
    } else if (typeof value === "string") {
      const text = Buffer.from(value);
      const length = Buffer.alloc(4);
      length.writeUInt32LE(text.length);
      opcode("X");
      parts.push(length, text);
    } else if (Array.isArray(value)) {
      opcode("](");
      value.forEach(put);
      opcode("e");
    } else {
      opcode("}(");
      Object.entries(value).flat().forEach(put);
      opcode("u");
    }
  };
  opcode("\x80\x02");
  put(value);
  opcode(".");
  return Buffer.concat(parts);
}
