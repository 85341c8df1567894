//! Infers which options the recorded job ran with.
//!
//! The text of `PYTORCH_CUDA_ALLOC_CONF` is from the start of the process, and the values beside it are from the
//! moment of the snapshot. Libraries switch `expandable_segments` off and on around pools of their own, so both may
//! differ from the job's option. The job's segments show it.

use lowtide_core::{Action, CachingConfig, Config, ConfigError};

use crate::model::Trace;
use crate::recover::is_large;
use crate::text::RecordedStr;

/// The kinds of segments that a job took from the driver; if it took none, those it had at the end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SegmentKinds {
    expandable: bool,
    plain: bool,
    large_plain: bool,
}

impl SegmentKinds {
    /// Returns the kinds of `segments`. Each item has whether the segment is expandable, and whether it is large.
    fn of(segments: impl Iterator<Item = (bool, bool)>) -> SegmentKinds {
        let mut kinds = SegmentKinds::default();
        for (is_expandable, is_large) in segments {
            kinds.expandable |= is_expandable;
            kinds.plain |= !is_expandable;
            kinds.large_plain |= !is_expandable && is_large;
        }
        kinds
    }

    /// Returns whether there are both expandable and other segments. No single value of the option was then in
    /// force for all of them.
    pub fn are_mixed(self) -> bool {
        self.expandable && self.plain
    }

    /// Returns whether `expandable_segments` was on. `option` is the recording's value.
    fn expandable_segments(self, option: bool) -> bool {
        match (self.expandable, self.plain) {
            // Small segments that are not expandable may be from before a library switched it on.
            (true, _) if !self.large_plain => true,
            (false, true) => false,
            _ => option,
        }
    }
}

/// Returns the `key:value` pairs of a text like `PYTORCH_CUDA_ALLOC_CONF`. A list in brackets is one value.
pub fn conf_pairs(conf: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0;
    let pairs = conf.split(move |letter| {
        match letter {
            '[' => depth += 1,
            ']' => depth -= 1,
            _ => {}
        }
        letter == ',' && depth == 0
    });
    pairs.map(str::trim).filter(|pair| !pair.is_empty())
}

impl Trace {
    /// Returns the options that were in force for the recorded events. Verification, replays and advice all start
    /// from them. They are the recorded values, on or off, and otherwise the text's.
    ///
    /// The segments decide about `expandable_segments`:
    /// - on for a job that mapped pages and took no other segment for large requests,
    /// - off for a job that took segments and mapped no page,
    /// - the value at the end for a job that did both ([`segment_kinds`](Trace::segment_kinds)) or neither.
    ///
    /// Those of a job that another strategy served say nothing about it.
    ///
    /// Linear time.
    ///
    /// # Errors
    ///
    /// If `lowtide_core` does not understand the text.
    pub fn config_in_force(&self) -> Result<CachingConfig, ConfigError> {
        let Config::Caching(began_with) = Config::parse("caching", self.settings.conf.raw())?
        else {
            unreachable!("the strategy is given above");
        };
        Ok(self.changed(began_with))
    }

    /// Returns the options like [`config_in_force`](Trace::config_in_force), but only from those pairs of the text
    /// that `lowtide_core` understands. Also returns the other pairs. Linear time.
    pub fn config_as_understood(&self) -> (CachingConfig, Vec<RecordedStr<'_>>) {
        if let Ok(config) = self.config_in_force() {
            return (config, Vec::new());
        }
        let parse = |pairs: &[&str]| Config::parse("caching", &pairs.join(","));
        let pairs = || conf_pairs(self.settings.conf.raw());
        // Other options are checked against this one, whatever their order.
        let is_measure =
            |pair: &&str| pair.starts_with("large_segment_size_mb") && parse(&[pair]).is_ok();
        let measure: Vec<&str> = pairs().filter(is_measure).last().into_iter().collect();
        let (understood, others): (Vec<&str>, Vec<&str>) =
            pairs().partition(|&pair| parse(&[&measure[..], &[pair]].concat()).is_ok());
        let recorded = |pairs: Vec<_>| pairs.into_iter().map(RecordedStr::from).collect();
        match parse(&understood) {
            Ok(Config::Caching(began_with)) => (self.changed(began_with), recorded(others)),
            _ => (
                self.changed(CachingConfig::default()),
                recorded(pairs().collect()),
            ),
        }
    }

    /// Returns the strategy that served the job, with the settings in force: `caching` for PyTorch's own allocator with its
    /// defaults. Linear time.
    pub fn strategy_in_force(&self) -> String {
        if !self.settings.strategy.is_empty() {
            return self.settings.strategy.raw().to_owned();
        }
        let (config, _) = self.config_as_understood();
        Config::Caching(config).to_string()
    }

    /// Returns the kinds of segments that the job took from the driver. Linear time.
    pub fn segment_kinds(&self) -> SegmentKinds {
        let taken = SegmentKinds::of(self.events.iter().filter_map(|recorded| {
            let event = recorded.event;
            match event.action {
                Action::SegmentMap => Some((true, is_large(event.size))),
                Action::SegmentAlloc => Some((false, is_large(event.size))),
                _ => None,
            }
        }));
        if taken != SegmentKinds::default() {
            return taken;
        }
        let held = self.segments.iter();
        SegmentKinds::of(held.map(|segment| (segment.is_expandable, segment.is_large)))
    }

    /// Returns `config` with the recorded values in place of the text's.
    fn changed(&self, mut config: CachingConfig) -> CachingConfig {
        let values = &self.settings;
        if let Some(size) = values.max_split_size {
            config.max_split_size = size;
        }
        if let Some(threshold) = values.garbage_collection_threshold {
            config.garbage_collection_threshold = threshold;
        }
        for &(mib, divisions) in &values.roundup_power2_divisions {
            let exponent = mib.checked_ilog2().unwrap_or(0).min(15);
            config.roundup_power2_divisions[exponent as usize] = divisions;
        }
        // The recording has it beside the options, because it is not an option of PyTorch's.
        if values.free_block_order.is_some() {
            config.free_block_order = None;
        }
        let option = values.expandable_segments;
        let option = option.unwrap_or(config.expandable_segments);
        config.expandable_segments = if self.settings.is_of_caching() {
            self.segment_kinds().expandable_segments(option)
        } else {
            option
        };
        config
    }
}

#[cfg(test)]
mod tests {
    use lowtide_core::{Bytes, DeviceAddress, Event, MempoolId, SegmentSnapshot, Stream};

    use super::*;
    use crate::model::{AllocatorSettings, TraceEvent};
    use crate::notes::NoteId;
    use crate::stacks::StackId;

    fn with_settings(settings: AllocatorSettings) -> Trace {
        Trace {
            settings,
            ..Trace::default()
        }
    }

    #[test]
    fn what_was_in_force_counts_on_or_off() {
        let text = "max_split_size_mb:64,garbage_collection_threshold:0.5,expandable_segments:True,\
                    roundup_power2_divisions:2";
        let mut trace = with_settings(AllocatorSettings {
            conf: text.into(),
            ..AllocatorSettings::default()
        });
        assert_eq!(
            Config::Caching(trace.config_in_force().unwrap()),
            Config::parse("caching", text).unwrap(),
            "without values the text counts"
        );

        let settings = &mut trace.settings;
        settings.max_split_size = Some(None);
        settings.garbage_collection_threshold = Some(0.0);
        settings.expandable_segments = Some(false);
        settings.roundup_power2_divisions = (0..16).map(|power| (1 << power, 0)).collect();
        assert_eq!(trace.config_in_force().unwrap(), CachingConfig::default());

        let settings = &mut trace.settings;
        settings.conf = "not a text".into();
        settings.max_split_size = Some(Some(Bytes::mib(64)));
        settings.garbage_collection_threshold = Some(0.75);
        settings.expandable_segments = Some(true);
        settings.roundup_power2_divisions = vec![(1, 8), (32768, 4)];
        assert!(trace.config_in_force().is_err());
        let (config, others) = trace.config_as_understood();
        assert_eq!(others, ["not a text".into()]);
        assert_eq!(config.max_split_size, Some(Bytes::mib(64)));
        assert!((config.garbage_collection_threshold - 0.75).abs() < f64::EPSILON);
        assert!(config.expandable_segments);
        let divisions = config.roundup_power2_divisions;
        assert_eq!((divisions[0], divisions[1], divisions[15]), (8, 0, 4));
    }

    #[test]
    fn what_is_not_understood_of_a_text_is_left_out_and_named() {
        let check = |text: &str, understood: &str, others: &[&str]| {
            let trace = with_settings(AllocatorSettings {
                conf: text.into(),
                ..AllocatorSettings::default()
            });
            let (config, left_out) = trace.config_as_understood();
            let expected = Config::parse("caching", understood).unwrap();
            let left_out: Vec<&str> = left_out.into_iter().map(RecordedStr::raw).collect();
            assert_eq!((Config::Caching(config), &left_out[..]), (expected, others));
        };
        check("max_split_size_mb:64", "max_split_size_mb:64", &[]);
        check(
            "new:[1:2,>:3],max_split_size_mb:64,expandable_segments:perhaps,newer",
            "max_split_size_mb:64",
            &["new:[1:2,>:3]", "expandable_segments:perhaps", "newer"],
        );
        let measured = "max_split_size_mb:16,large_segment_size_mb:12";
        check(&format!("{measured},new:1"), measured, &["new:1"]);
        check(
            "max_split_size_mb:16,new:1",
            "",
            &["max_split_size_mb:16", "new:1"],
        );
    }

    /// Checks the option inferred for a job, and whether its segments are mixed. The job took segments by `events`.
    /// At its end it had an expandable or other segment, and its option was on or off.
    #[track_caller]
    fn check(events: &[(Action, u64)], at_end: Option<bool>, option: bool, expected: (bool, bool)) {
        let recorded = |&(action, mib)| TraceEvent {
            event: Event {
                action,
                pool: MempoolId::DEFAULT,
                address: DeviceAddress(0),
                size: Bytes::mib(mib),
                stream: Stream::DEFAULT,
            },
            time_us: 0,
            stack: StackId::NONE,
            pool_known: false,
            note: NoteId::NONE,
        };
        let segment = |is_expandable| SegmentSnapshot {
            address: DeviceAddress(0),
            size: Bytes::mib(20),
            stream: Stream::DEFAULT,
            pool: MempoolId::DEFAULT,
            is_large: true,
            is_expandable,
            blocks: Vec::new(),
        };
        let trace = Trace {
            events: events.iter().map(recorded).collect(),
            segments: at_end.map(segment).into_iter().collect(),
            ..with_settings(AllocatorSettings {
                expandable_segments: Some(option),
                ..AllocatorSettings::default()
            })
        };
        let is_on = trace.config_in_force().unwrap().expandable_segments;
        assert_eq!((is_on, trace.segment_kinds().are_mixed()), expected);
        // Those of another strategy do not show it.
        let mut of_tide = trace;
        of_tide.settings.strategy = "tide".into();
        let is_on = of_tide.config_in_force().unwrap().expandable_segments;
        assert_eq!(is_on, option);
    }

    #[test]
    fn segments_show_whether_they_were_expandable() {
        let (map, small, large) = (
            (Action::SegmentMap, 20),
            (Action::SegmentAlloc, 2),
            (Action::SegmentAlloc, 20),
        );
        for option in [false, true] {
            check(&[map], Some(true), option, (true, false));
            check(&[map], None, option, (true, false));
            check(&[small, map], Some(false), option, (true, true));
            check(&[large], Some(false), option, (false, false));
            check(&[small], None, option, (false, false));
            check(&[large, map], Some(true), option, (option, true));
            // Segments that existed before the first event were made with the options of that time.
            check(&[map], Some(false), option, (true, false));
            check(&[(Action::Alloc, 1)], Some(true), option, (true, false));
            check(&[(Action::Alloc, 1)], Some(false), option, (false, false));
            check(&[(Action::Alloc, 1)], None, option, (option, false));
        }
    }
}
