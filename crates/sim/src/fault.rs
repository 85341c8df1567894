//! Injected failures of driver calls.

use lowtide_core::DriverError;

use crate::call::Call;

/// A plan of failures: which of the later calls fail, and with which error.
///
/// A failed call has no effect. [`Call::ReleaseEvent`] never fails, and is not counted.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FaultPlan {
    when: When,
    error: DriverError,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum When {
    Never,
    /// The call that makes `left` zero fails, counting calls of this kind or of any. If `left` starts at zero, none
    /// fails.
    Nth {
        call: Option<Call>,
        left: u64,
    },
    Every(&'static [Call]),
    Random {
        state: u64,
        one_in: u64,
    },
}

impl FaultPlan {
    /// Returns a plan without failures.
    pub const fn none() -> FaultPlan {
        FaultPlan {
            when: When::Never,
            error: DriverError::OutOfMemory,
        }
    }

    /// Returns a plan that fails the `n`-th call of one kind, counted from 1, once.
    pub const fn nth(call: Call, n: u64, error: DriverError) -> FaultPlan {
        let call = Some(call);
        let when = When::Nth { call, left: n };
        FaultPlan { when, error }
    }

    /// Returns the plan that fails the `n`-th call of any kind, counted from 1, once.
    pub const fn nth_of_any(n: u64, error: DriverError) -> FaultPlan {
        let call = None;
        let when = When::Nth { call, left: n };
        FaultPlan { when, error }
    }

    /// Returns a plan that fails one call in `one_in` on average, at random. The same `seed` fails the same calls.
    ///
    /// # Panics
    ///
    /// If `one_in` is zero.
    pub const fn random(seed: u64, one_in: u64, error: DriverError) -> FaultPlan {
        assert!(one_in > 0, "one call in zero cannot fail");
        let state = seed;
        let when = When::Random { state, one_in };
        FaultPlan { when, error }
    }

    /// Returns a plan that fails every call of some kinds.
    pub const fn every(calls: &'static [Call], error: DriverError) -> FaultPlan {
        let when = When::Every(calls);
        FaultPlan { when, error }
    }

    /// Returns the error of this call if it is to fail.
    pub(crate) fn next(&mut self, call: Call) -> Option<DriverError> {
        let fails = match &mut self.when {
            When::Never => false,
            When::Nth { call: only, left } => {
                let counts = *left > 0 && only.is_none_or(|only| only == call);
                *left -= u64::from(counts);
                counts && *left == 0
            }
            When::Every(calls) => calls.contains(&call),
            When::Random { state, one_in } => random(state).is_multiple_of(*one_in),
        };
        fails.then(|| self.error.clone())
    }
}

impl Default for FaultPlan {
    fn default() -> FaultPlan {
        FaultPlan::none()
    }
}

/// Returns the next number of SplitMix64 (Steele, Lea and Flood).
pub(crate) fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut mixed = *state;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failing(mut plan: FaultPlan, calls: &[Call]) -> Vec<usize> {
        let fails = |&(_, &call): &(usize, &Call)| plan.next(call).is_some();
        calls
            .iter()
            .enumerate()
            .filter(fails)
            .map(|(index, _)| index)
            .collect()
    }

    const CALLS: [Call; 6] = [
        Call::Create,
        Call::Map,
        Call::Create,
        Call::Map,
        Call::Create,
        Call::Create,
    ];

    #[test]
    fn the_nth_call_fails_and_no_other() {
        let error = DriverError::OutOfMemory;
        let cases: [(FaultPlan, &[usize]); 6] = [
            (FaultPlan::none(), &[]),
            (FaultPlan::nth(Call::Create, 1, error.clone()), &[0]),
            (FaultPlan::nth(Call::Create, 3, error.clone()), &[4]),
            (FaultPlan::nth(Call::Unmap, 1, error.clone()), &[]),
            (FaultPlan::nth_of_any(4, error.clone()), &[3]),
            (FaultPlan::nth_of_any(0, error), &[]),
        ];
        for (plan, expected) in cases {
            assert_eq!(failing(plan.clone(), &CALLS), expected, "{plan:?}");
        }
    }

    #[test]
    fn random_faults_repeat_with_their_seed() {
        let calls = [Call::Allocate; 4000];
        let plan = |seed| FaultPlan::random(seed, 10, DriverError::OutOfMemory);
        let faults = failing(plan(1), &calls);
        assert!(
            (200..=600).contains(&faults.len()),
            "{} of 4000",
            faults.len()
        );
        assert_eq!(failing(plan(1), &calls), faults);
        assert_ne!(failing(plan(2), &calls), faults);
    }
}
