// A PyTorch memory snapshot of a made-up job, as a pickle: what `lowtide` itself reads.

const SEGMENT = 0x7f00_0000_0000;
const MIB = 2 ** 20;
/** As many different requests a job makes, from as many places. */
const PLACES = 100;

type Value = null | number | string | Value[] | { [key: string]: Value };

/** What a leak's blocks were asked for by: no code of the job's own. */
const LIBRARY: Value = {
  name: "append",
  filename: "/usr/lib/python3.12/site-packages/history/log.py",
  line: 3,
};

/** Returns a job of 20 steps of so many `requests`, each of which keeps one more block of `leakBytes`. */
export function leakingJob(leakBytes: number, hasStacks: boolean, requests = PLACES): Uint8Array {
  const segmentBytes = Math.max(2 ** 31, (requests + 200) * MIB);
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
  push("segment_alloc", SEGMENT, segmentBytes, []);
  for (let step = 0; step < 20; step++) {
    const served = Array.from({ length: requests }, (_, i) => ({
      address: SEGMENT + i * MIB,
      size: 4096 * ((i % PLACES) + 1),
      frames: [frame("forward", i % PLACES), frame("main", 2)],
    }));
    for (const { address, size, frames } of served) push("alloc", address, size, frames);
    const address = SEGMENT + (requests + 100 + 4 * step) * MIB;
    push("alloc", address, leakBytes, leak);
    held.push(address);
    for (const { address, size } of served.reverse()) {
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
  pass(SEGMENT + segmentBytes);
  const segment = {
    device: 0,
    address: SEGMENT,
    total_size: segmentBytes,
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
  let bytes = Buffer.alloc(2 ** 16);
  let end = 0;
  /** Makes room for so many bytes, and returns where it is. */
  const room = (count: number): number => {
    if (end + count > bytes.length) bytes = Buffer.concat([bytes], 2 * bytes.length + count);
    end += count;
    return end - count;
  };
  const text = (content: string, encoding: BufferEncoding) => {
    const at = room(Buffer.byteLength(content, encoding));
    bytes.write(content, at, encoding);
  };
  const opcode = (code: string) => text(code, "latin1");
  const put = (value: Value): void => {
    if (value === null) opcode("N");
    else if (typeof value === "number") {
      opcode("\x8a\x08");
      const at = room(8);
      bytes.writeBigInt64LE(BigInt(value), at);
    } else if (typeof value === "string") {
      opcode("X");
      const at = room(4);
      bytes.writeUInt32LE(Buffer.byteLength(value), at);
      text(value, "utf8");
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
  return bytes.subarray(0, end);
}
