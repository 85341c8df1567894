//! The strategy of a process, and its options.

use std::sync::{Mutex, MutexGuard};

use lowtide_core::{Config, FreeBlockOrder, TorchRelease};
use lowtide_explain::Configured;
use lowtide_trace::AllocatorSettings;

use crate::devices;
use crate::environment::variable;
use crate::error::{Error, Status};

/// PyTorch's own variables. The first that is set counts, even if it is empty.
const PYTORCH_VARIABLES: [&str; 3] = [
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
];

/// The strategy if neither a strategy nor options are named: it has none. In front of the driver it is `caching`: programs
/// share that memory by `cuIpcGetMemHandle`, which refuses mapped memory.
const DEFAULT_STRATEGY: &str = "tide";

/// The program's choice. The environment decides what the program did not choose.
#[derive(Clone, Default, Debug)]
pub(crate) struct Choice {
    strategy: Option<Setting>,
    conf: Option<Setting>,
}

/// A text, and the environment variable that has it; `None` if it is the program's.
type Setting = (String, Option<&'static str>);

impl Choice {
    pub(crate) fn of_program(strategy: Option<&str>, conf: Option<&str>) -> Choice {
        Choice {
            strategy: strategy.map(|text| (text.to_owned(), None)),
            conf: conf.map(|text| (text.to_owned(), None)),
        }
    }

    /// Returns the choice of `LOWTIDE_STRATEGY` and `LOWTIDE_CONF` only. PyTorch's variables are for PyTorch's
    /// own allocator, which may run on top of this one.
    pub(crate) fn of_environment_alone(variable: impl Fn(&str) -> Option<String>) -> Choice {
        let ours = |name| Some((variable(name).unwrap_or_default(), Some(name)));
        Choice {
            strategy: ours("LOWTIDE_STRATEGY").filter(|(text, _)| !text.is_empty()),
            conf: ours("LOWTIDE_CONF"),
        }
    }

    /// Returns whether neither a strategy nor options are chosen.
    fn is_open(&self) -> bool {
        self.strategy.is_none() && self.conf.is_none()
    }

    /// Returns the configuration, given the environment's variables.
    ///
    /// - The options are the program's; else `LOWTIDE_CONF`, unless the program named the strategy; else
    ///   PyTorch's own for `caching`; else none.
    /// - The strategy is the program's, else `LOWTIDE_STRATEGY`; else `caching`, if the program or `LOWTIDE_CONF` has
    ///   options, or if lowtide is in front of the driver; else `tide`.
    ///
    /// An empty `LOWTIDE_` variable counts as unset.
    ///
    /// # Errors
    ///
    /// If the strategy or an option is unknown, or a value is refused. The error names the variable.
    pub(crate) fn resolve(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, Error> {
        let of_variable = |name| Some((variable(name)?, Some(name)));
        let ours = |name| of_variable(name).filter(|(text, _)| !text.is_empty());
        let named = self.strategy.clone();
        let ours_counts = named.is_none();
        let conf = self.conf.clone();
        let conf = conf.or_else(|| ours("LOWTIDE_CONF").filter(|_| ours_counts));
        let has_options = conf.as_ref().is_some_and(|(text, _)| !text.is_empty());
        let default = if has_options || ours("LOWTIDE_PRELOAD").is_some() {
            "caching"
        } else {
            DEFAULT_STRATEGY
        };
        let (strategy, strategy_from) = named
            .or_else(|| ours("LOWTIDE_STRATEGY"))
            .unwrap_or_else(|| (default.to_owned(), None));
        let pytorch = || {
            let set = PYTORCH_VARIABLES.into_iter().find_map(of_variable);
            set.filter(|_| strategy == "caching")
        };
        let (conf, conf_from) = conf.or_else(pytorch).unwrap_or_default();
        Config::parse(&strategy, &conf).map_err(|error| {
            let is_of_strategy = Config::parse(&strategy, "").is_err();
            let from = if is_of_strategy {
                strategy_from
            } else {
                conf_from
            };
            let from = from.map(|name| format!(" ({name})")).unwrap_or_default();
            Error::new(Status::Config, format_args!("{error}{from}"))
        })
    }

    /// Returns where the settings that [`Choice::resolve`] returns come from, so that a user knows what to
    /// change. If they are set nowhere, returns where they can be set.
    pub(crate) fn configured(&self, variable: impl Fn(&str) -> Option<String>) -> Configured {
        let ours = |name| variable(name).is_some_and(|text| !text.is_empty());
        let is_programs = |setting: &Option<Setting>| matches!(setting, Some((_, None)));
        let names_strategy = is_programs(&self.strategy);
        let mut pytorch = PYTORCH_VARIABLES.into_iter();
        let pytorch = pytorch.find(|name| variable(name).is_some());
        let options_variable = match (&self.conf, pytorch) {
            (Some((_, from)), _) => *from,
            _ if ours("LOWTIDE_CONF") && !names_strategy => Some("LOWTIDE_CONF"),
            (None, Some(name)) => Some(name),
            _ if ours("LOWTIDE_STRATEGY") && !names_strategy => Some("LOWTIDE_CONF"),
            _ => Some(PYTORCH_VARIABLES[0]),
        };
        Configured {
            options_variable,
            is_by_program: names_strategy || is_programs(&self.conf),
        }
    }
}

/// This process's settings. Locked while a device is started.
static SETTINGS: Mutex<Settings> = Mutex::new(Settings {
    choice: Choice {
        strategy: None,
        conf: None,
    },
    torch: None,
    config: None,
});

/// The settings that a device is made with.
pub(crate) struct Settings {
    choice: Choice,
    /// The PyTorch release that the memory is for.
    torch: Option<TorchRelease>,
    /// The configuration from the program's choice and the environment. Once a device was used it is fixed, and
    /// only [`reconfigure`] changes it.
    config: Option<Config>,
}

/// Locks the settings that devices are made with.
pub(crate) fn lock() -> Result<MutexGuard<'static, Settings>, Error> {
    devices::lock(&SETTINGS)
}

/// Sets the program's choice, if no device is in use yet.
///
/// # Errors
///
/// If a device is in use, or the configuration is refused. Nothing has changed then.
pub(crate) fn configure(choice: Choice) -> Result<(), Error> {
    let mut settings = lock()?;
    settings.refuse_started()?;
    choice.resolve(variable)?;
    settings.choice = choice;
    Ok(())
}

/// Sets the choice of a process with lowtide in front of the driver, unless the program chose already.
///
/// # Errors
///
/// If the configuration is refused.
pub(crate) fn configure_preloaded(choice: Choice) -> Result<(), Error> {
    let mut settings = lock()?;
    if settings.config.is_none() && settings.choice.is_open() {
        choice.resolve(variable)?;
        settings.choice = choice;
    }
    Ok(())
}

/// Changes the options, also while devices are in use, and fixes the configuration.
///
/// # Errors
///
/// If the options are refused. Nothing has changed then.
pub(crate) fn reconfigure(options: &str) -> Result<(), Error> {
    let _in_order = devices::begin_change()?;
    let config = {
        let mut settings = lock()?;
        let order = settings.order();
        // Without the order of free blocks, which nobody asked for.
        let config = settings.config()?.reconfigured(options, order)?;
        settings.config = Some(config);
        settings.config_in_job()?
    };
    devices::for_each(|_, allocator| Ok(allocator.for_each_lane(|lane| lane.reconfigure(&config))?))
}

/// Sets the PyTorch release that the memory is for.
///
/// # Errors
///
/// If a device is in use.
pub(crate) fn set_torch(release: TorchRelease) -> Result<(), Error> {
    let mut settings = lock()?;
    settings.refuse_started()?;
    settings.torch = Some(release);
    Ok(())
}

/// Returns the PyTorch release that the memory is for, if it was set.
pub(crate) fn torch() -> Result<Option<TorchRelease>, Error> {
    Ok(lock()?.torch)
}

/// Returns the configuration, which is fixed after this call.
///
/// # Errors
///
/// If the configuration is refused.
pub(crate) fn config() -> Result<Config, Error> {
    lock()?.config().cloned()
}

/// Returns the configuration, without fixing it.
///
/// # Errors
///
/// If the configuration is refused.
pub(crate) fn chosen() -> Result<Config, Error> {
    lock()?.chosen()
}

/// Returns the settings as recordings have them. The configuration is fixed after this call.
///
/// # Errors
///
/// If the configuration is refused.
pub(crate) fn recorded() -> Result<AllocatorSettings, Error> {
    lock()?.recorded()
}

/// Returns which of several free blocks of one size `caching` takes if no option says so.
pub(crate) fn order() -> Result<Option<FreeBlockOrder>, Error> {
    Ok(lock()?.order())
}

/// Returns what a user has to change for another strategy or other options than those in force.
pub(crate) fn configured() -> Result<Configured, Error> {
    Ok(lock()?.choice.configured(variable))
}

impl Settings {
    fn refuse_started(&self) -> Result<(), Error> {
        if self.config.is_some() {
            let text = "lowtide is in use already: configure it before the first request";
            return Err(Error::new(Status::Started, text));
        }
        Ok(())
    }

    /// Returns which of several free blocks of one size `caching` takes if no option says so.
    fn order(&self) -> Option<FreeBlockOrder> {
        self.torch.map(FreeBlockOrder::of_torch)
    }

    fn chosen(&self) -> Result<Config, Error> {
        match &self.config {
            Some(fixed) => Ok(fixed.clone()),
            None => self.choice.resolve(variable),
        }
    }

    fn config(&mut self) -> Result<&Config, Error> {
        let config = self.chosen()?;
        Ok(self.config.insert(config))
    }

    /// Returns the configuration for an allocator, with PyTorch's order of free blocks.
    ///
    /// # Errors
    ///
    /// If the configuration is refused.
    pub(crate) fn config_in_job(&mut self) -> Result<Config, Error> {
        let order = self.order();
        Ok(self.config()?.clone().in_order(order).in_job())
    }

    /// Returns the settings as recordings have them.
    ///
    /// # Errors
    ///
    /// If the configuration is refused.
    pub(crate) fn recorded(&mut self) -> Result<AllocatorSettings, Error> {
        let order = self.order();
        let config = self.config()?;
        let (conf, asked) = match config {
            Config::Caching(options) => (config.to_conf(), options.free_block_order),
            // The text is for PyTorch's allocator, and this strategy is not PyTorch's.
            _ => (String::new(), None),
        };
        Ok(AllocatorSettings {
            conf: conf.into(),
            free_block_order: asked.or(order).or(Some(FreeBlockOrder::default())),
            strategy: config.to_string().into(),
            ..AllocatorSettings::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(choice: (Option<&str>, Option<&str>), environment: &[(&str, &str)]) -> String {
        let choice = Choice::of_program(choice.0, choice.1);
        match choice.resolve(in_environment(environment)) {
            Ok(config) => config.to_string(),
            Err(error) => error.text,
        }
    }

    fn in_environment(environment: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        move |name: &str| {
            let found = environment.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        }
    }

    #[test]
    fn what_is_advised_to_change_is_what_counts() {
        let program = Choice::of_program;
        let conf = ("LOWTIDE_CONF", "max_split_size_mb:64");
        let check =
            |choice: Choice, environment: &[(&str, &str)], expected: (Option<&str>, bool)| {
                let found = choice.configured(in_environment(environment));
                assert_eq!(
                    (found.options_variable, found.is_by_program),
                    expected,
                    "{choice:?}, {environment:?}"
                );
                let Some(variable) = found.options_variable else {
                    return;
                };
                // And that changed counts.
                let advised = (variable, "expandable_segments:True");
                let others = environment.iter().filter(|(name, _)| *name != variable);
                let changed: Vec<_> = others.copied().chain([advised]).collect();
                let choice = if matches!(choice.conf, Some((_, Some(_)))) {
                    Choice::of_environment_alone(in_environment(&changed))
                } else {
                    choice
                };
                let config = choice.resolve(in_environment(&changed)).unwrap();
                assert_eq!(config.to_string(), "caching:expandable_segments:True");
            };
        let pytorch = Some("PYTORCH_CUDA_ALLOC_CONF");
        let ours = Some("LOWTIDE_CONF");
        check(program(None, None), &[PYTORCH, CACHING], (pytorch, false));
        check(
            program(None, None),
            &[PYTORCH, CACHING, conf],
            (ours, false),
        );
        check(program(None, None), &[PYTORCH, conf], (ours, false));
        check(program(None, None), &[CACHING], (ours, false));
        let newer = ("PYTORCH_ALLOC_CONF", "max_split_size_mb:64");
        check(
            program(None, None),
            &[newer, CACHING],
            (Some("PYTORCH_ALLOC_CONF"), false),
        );
        // The environment's options are for the environment's strategy.
        check(
            program(Some("caching"), None),
            &[PYTORCH, conf],
            (pytorch, true),
        );
        check(
            program(Some("caching"), None),
            &[CACHING, conf],
            (pytorch, true),
        );
        check(
            program(None, Some("")),
            &[PYTORCH, CACHING, conf],
            (None, true),
        );
        check(program(Some("caching"), Some("")), &[], (None, true));
        for environment in [&[PYTORCH, PRELOADED][..], &[PYTORCH, CACHING, conf]] {
            let alone = Choice::of_environment_alone(in_environment(environment));
            check(alone, environment, (ours, false));
        }
    }

    const PRELOADED: (&str, &str) = ("LOWTIDE_PRELOAD", "1");
    const CACHING: (&str, &str) = ("LOWTIDE_STRATEGY", "caching");
    const PYTORCH: (&str, &str) = ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64");

    #[test]
    fn the_environment_decides_where_the_program_does_not() {
        let nothing = (None, None);
        assert_eq!(resolved(nothing, &[]), "tide");
        assert_eq!(resolved(nothing, &[PYTORCH]), "tide");
        assert_eq!(resolved(nothing, &[PRELOADED]), "caching");
        assert_eq!(
            resolved(nothing, &[CACHING, PYTORCH]),
            "caching:max_split_size_mb:64"
        );
        let bfc = ("LOWTIDE_STRATEGY", "bfc");
        assert_eq!(resolved(nothing, &[bfc, PYTORCH]), "bfc");
        let conf = ("LOWTIDE_CONF", "expandable_segments:True");
        assert_eq!(
            resolved(nothing, &[conf, PYTORCH]),
            "caching:expandable_segments:True"
        );
        assert_eq!(
            resolved((None, Some("expandable_segments:True")), &[PYTORCH]),
            "caching:expandable_segments:True"
        );
        assert_eq!(resolved((None, Some("")), &[conf, PYTORCH]), "tide");
        let empty = ("LOWTIDE_CONF", "");
        assert_eq!(
            resolved(nothing, &[CACHING, empty, PYTORCH]),
            "caching:max_split_size_mb:64"
        );
        assert_eq!(
            resolved(nothing, &[empty, ("LOWTIDE_STRATEGY", "")]),
            "tide"
        );
    }

    #[test]
    fn the_programs_choice_comes_first() {
        let environment = [
            ("LOWTIDE_STRATEGY", "bfc"),
            ("LOWTIDE_CONF", "retry_ms:5"),
            PYTORCH,
        ];
        assert_eq!(resolved((Some("buddy"), None), &environment), "buddy");
        assert_eq!(
            resolved((Some("caching"), None), &environment),
            "caching:max_split_size_mb:64"
        );
        assert_eq!(
            resolved((Some("caching"), Some("")), &environment),
            "caching"
        );
        assert_eq!(
            resolved((None, Some("retry_ms:7")), &environment),
            "bfc:retry_ms:7"
        );
    }

    #[test]
    fn what_is_refused_is_named_with_its_variable() {
        let check = |choice, environment: &[(&str, &str)], expected: &str| {
            let text = resolved(choice, environment);
            assert!(text.ends_with(expected), "{text}");
        };
        let nothing = (None, None);
        let strategy = ("LOWTIDE_STRATEGY", "best");
        let [ours, pytorch] = ["LOWTIDE_CONF", "PYTORCH_ALLOC_CONF"];
        let [ours, pytorch] = [ours, pytorch].map(|name| (name, "max_split_size_mb:many"));
        check(
            nothing,
            &[strategy, ours],
            "caching, tide (LOWTIDE_STRATEGY)",
        );
        let refused = "stoull: 'many' is not a whole number in range";
        check(
            nothing,
            &[ours, pytorch],
            &format!("{refused} (LOWTIDE_CONF)"),
        );
        check(
            nothing,
            &[CACHING, pytorch],
            &format!("{refused} (PYTORCH_ALLOC_CONF)"),
        );
        check((Some("best"), None), &[strategy, ours], "caching, tide");
        let conf = (None, Some("max_split_size_mb:many"));
        check(conf, &[pytorch], refused);
        let alone = Choice::of_environment_alone(in_environment(&[ours]));
        let error = alone.resolve(in_environment(&[ours])).unwrap_err();
        assert_eq!(error.text, format!("{refused} (LOWTIDE_CONF)"));
    }

    #[test]
    fn without_pytorch_the_environment_is_ours_alone() {
        let chosen = |environment: &[(&str, &str)]| {
            let choice = Choice::of_environment_alone(in_environment(environment));
            let config = choice.resolve(in_environment(environment));
            config.unwrap().to_string()
        };
        assert_eq!(chosen(&[PYTORCH, PRELOADED]), "caching");
        let ours = [
            ("LOWTIDE_STRATEGY", "bfc"),
            ("LOWTIDE_CONF", "retry_ms:5"),
            PYTORCH,
        ];
        assert_eq!(chosen(&ours), "bfc:retry_ms:5");
    }

    #[test]
    fn the_first_of_pytorchs_variables_that_is_set_counts() {
        let last = ("PYTORCH_ALLOC_CONF", "expandable_segments:True");
        let nothing = (None, None);
        assert_eq!(
            resolved(nothing, &[CACHING, last]),
            "caching:expandable_segments:True"
        );
        assert_eq!(
            resolved(nothing, &[CACHING, ("PYTORCH_HIP_ALLOC_CONF", ""), last]),
            "caching"
        );
        assert!(resolved(nothing, &[("LOWTIDE_STRATEGY", "best")]).contains("'best'"));
    }
}
