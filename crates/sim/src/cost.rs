//! The host time of each call, measured on one H200 (driver 580, CUDA 13.0); medians of calls on an idle device.
//!
//! Absolute times differ between machines. They serve to compare strategies, not to predict a job's time.

use lowtide_core::Bytes;

use crate::call::Call;

/// Returns the host time of a call, in nanoseconds. `size` is the size of one piece of physical memory or of the
/// address range.
///
/// Between the measured sizes, the cost is interpolated. Below the smallest size, it is that size's cost. Above the
/// largest, it is extrapolated from the last two sizes. For address ranges it then stays constant: they have no
/// memory behind them, and may be many times larger than any card.
pub(crate) fn cost_ns(call: Call, size: Bytes) -> u64 {
    let Some(costs) = by_size(call) else {
        return fixed(call);
    };
    let size = u128::from(size.get());
    let Some(above) = SIZES_MIB
        .iter()
        .position(|&mib| size < u128::from(mib) << 20)
    else {
        return match call {
            Call::Reserve | Call::Unreserve => costs[SIZES_MIB.len() - 1],
            _ => interpolate(size, SIZES_MIB.len() - 1, costs),
        };
    };
    if above == 0 {
        costs[0]
    } else {
        interpolate(size, above, costs)
    }
}

/// The cost of allocating or freeing memory that shares a 2 MiB page which stays on the device, measured for 512
/// bytes to 64 KiB.
pub(crate) const SHARED_NS: u64 = 900;

/// The measured sizes, in MiB.
const SIZES_MIB: [u64; 7] = [2, 20, 64, 256, 1024, 8192, 32768];

/// The costs at [`SIZES_MIB`], in nanoseconds. Where a larger size measured up to 2 % less than a smaller one, this
/// is noise, and the smaller size's cost is used.
///
/// Allocating 32 GiB took 85 ms and creating 32 GiB took 124 ms, because the card was still clearing pages that had
/// been released just before. Here their costs are extrapolated from 1 and 8 GiB.
const fn by_size(call: Call) -> Option<&'static [u64; 7]> {
    Some(match call {
        Call::Allocate => &[26_500, 31_800, 46_300, 56_800, 70_700, 422_000, 1_626_000],
        Call::Free => &[
            23_500, 32_000, 52_200, 92_400, 259_000, 2_571_000, 11_738_000,
        ],
        Call::Reserve => &[450, 560, 1_500, 1_500, 1_600, 2_600, 15_000],
        Call::Create => &[6_100, 6_800, 6_800, 18_000, 28_400, 236_000, 948_000],
        Call::Map => &[490, 540, 540, 580, 620, 1_300, 16_000],
        Call::SetAccess => &[17_000, 18_100, 36_600, 38_100, 59_100, 227_000, 795_000],
        Call::Unmap => &[12_200, 12_800, 19_900, 19_900, 27_300, 85_000, 302_000],
        Call::Release => &[
            7_900, 12_200, 23_600, 67_200, 231_000, 2_498_000, 10_875_000,
        ],
        Call::Unreserve => &[400, 500, 1_700, 1_700, 1_800, 3_500, 22_000],
        _ => return None,
    })
}

/// The cost of a call without a size, in nanoseconds. For a call that waits, the cost when there is nothing to wait
/// for.
const fn fixed(call: Call) -> u64 {
    match call {
        // A stream wait was not measured. It submits as much to its stream as an event does.
        Call::RecordEvent | Call::QueryEvent | Call::WaitEvent => 150,
        Call::SynchronizeEvent => 170,
        Call::ReleaseEvent => 100,
        Call::SynchronizeStream | Call::SynchronizeDevice => 210,
        Call::MemoryInfo => 3_900,
        _ => unreachable!(),
    }
}

/// Returns the cost at `size` on the line through the measurements `upper - 1` and `upper`.
fn interpolate(size: u128, upper: usize, costs: &[u64; 7]) -> u64 {
    let [start, end] = [upper - 1, upper].map(|index| u128::from(SIZES_MIB[index]) << 20);
    let [low, high] = [upper - 1, upper].map(|index| u128::from(costs[index]));
    let cost = low + (high - low) * (size - start) / (end - start);
    u64::try_from(cost).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_the_measured_ones_and_lines_between() {
        let cases = [
            (Call::Allocate, Bytes(1), 26_500),
            (Call::Allocate, Bytes::mib(2), 26_500),
            (Call::Allocate, Bytes::mib(11), 29_150),
            (Call::Allocate, Bytes::mib(20), 31_800),
            (Call::Release, Bytes::gib(8), 2_498_000),
            (Call::Release, Bytes::gib(20), 6_686_500),
            (Call::Release, Bytes::gib(32), 10_875_000),
            (Call::Release, Bytes::gib(56), 19_252_000),
            (Call::Reserve, Bytes::gib(1 << 16), 15_000),
            (Call::MemoryInfo, Bytes::gib(8), 3_900),
        ];
        for (call, size, expected_ns) in cases {
            assert_eq!(cost_ns(call, size), expected_ns, "{call} {size}");
        }
    }

    #[test]
    fn more_memory_never_costs_less() {
        for call in Call::ALL {
            let costs = (0..64).map(|exponent| cost_ns(call, Bytes(1 << exponent)));
            assert!(costs.is_sorted(), "{call}");
        }
    }
}
