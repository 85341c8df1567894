//! The straight line that fits a sequence of values best.

/// The distances of values from each other and from a straight line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit {
    /// The sum of the squared distances from the mean.
    around_mean: f64,
    /// The sum of the squared distances from the line.
    around_line: f64,
    /// By how much the line rises from the first value to the last.
    rise: f64,
}

impl Fit {
    /// Returns the fit of a line by least squares to `values`, which are at equal distances.
    pub(super) fn of(values: &[u64]) -> Fit {
        let count = as_float(values.len().max(1) as u64);
        let mean = values.iter().map(|&value| as_float(value)).sum::<f64>() / count;
        let mean_index = (count - 1.0) / 2.0;
        let (mut both, mut of_indices, mut around_mean) = (0.0, 0.0, 0.0);
        for (index, &value) in (0_u64..).zip(values) {
            let (index, value) = (as_float(index) - mean_index, as_float(value) - mean);
            both += index * value;
            of_indices += index * index;
            around_mean += value * value;
        }
        let slope = if of_indices > 0.0 {
            both / of_indices
        } else {
            0.0
        };
        Fit {
            around_mean,
            around_line: (around_mean - slope * both).max(0.0),
            rise: slope * (count - 1.0),
        }
    }

    /// Returns by how much the line rises from the first value to the last.
    pub(super) fn rise(self) -> f64 {
        self.rise
    }

    /// Returns the share of the variation that is a change at a constant rate: the coefficient of determination, in
    /// [0, 1]; 0 if nothing changes.
    pub(super) fn straightness(self) -> f64 {
        if self.around_mean > 0.0 {
            1.0 - self.around_line / self.around_mean
        } else {
            0.0
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    reason = "shares, and averages for people"
)]
pub(super) fn as_float(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fits_itself_and_what_stays_has_none() {
        let check = |values: &[u64], straightness: f64, rise: f64| {
            let fit = Fit::of(values);
            let is_near = |left: f64, right: f64| (left - right).abs() < 1e-9;
            assert!(
                is_near(fit.straightness(), straightness),
                "{values:?}: {fit:?}"
            );
            assert!(is_near(fit.rise(), rise), "{values:?}: {fit:?}");
        };
        check(&[5, 7, 9, 11], 1.0, 6.0);
        check(&[9, 6, 3, 0], 1.0, -9.0);
        check(&[4, 4, 4], 0.0, 0.0);
        // Least squares by hand: the line stays at the mean.
        check(&[1, 3, 3, 1], 0.0, 0.0);
        check(&[7], 0.0, 0.0);
        check(&[], 0.0, 0.0);
    }
}
