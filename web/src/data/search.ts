// Binary search in sorted arrays of numbers.

/** Returns how many of the sorted values are at most `value`. */
export function upperBound(values: Uint32Array | Float64Array, value: number): number {
  let low = 0;
  let high = values.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (values[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low;
}
