//! Which strategy a process uses, and with which options.

use lowtide_core::{Config, ConfigError};

/// PyTorch's own variables. It takes the first that is set, be it empty.
const PYTORCH_VARIABLES: [&str; 3] = [
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
];

/// What serves those who name none.
const DEFAULT_STRATEGY: &str = "caching";

/// What the program asked for; where it did not, the environment decides.
#[derive(Clone, Default, Debug)]
pub(crate) struct Choice {
    pub(crate) strategy: Option<String>,
    pub(crate) conf: Option<String>,
}

impl Choice {
    /// Returns what `LOWTIDE_STRATEGY` and `LOWTIDE_CONF` ask for, and nothing else: PyTorch's variables are
    /// for PyTorch's own allocator, which may run on top of this one.
    pub(crate) fn of_environment_alone(variable: impl Fn(&str) -> Option<String>) -> Choice {
        let ours = |name| variable(name).filter(|text| !text.is_empty());
        Choice {
            strategy: Some(ours("LOWTIDE_STRATEGY").unwrap_or_else(|| DEFAULT_STRATEGY.to_owned())),
            conf: Some(ours("LOWTIDE_CONF").unwrap_or_default()),
        }
    }

    /// Returns the configuration, given the environment's variables.
    ///
    /// The strategy is the program's, else `LOWTIDE_STRATEGY`, else `caching`. The options are the
    /// program's, else `LOWTIDE_CONF` unless the program named the strategy, else PyTorch's own for
    /// `caching`, else none. An empty `LOWTIDE_` variable counts as unset.
    ///
    /// # Errors
    ///
    /// If the strategy or an option is unknown, or a value is refused.
    pub(crate) fn resolve(
        &self,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Config, ConfigError> {
        let ours = |name| variable(name).filter(|text| !text.is_empty());
        let named = self.strategy.clone();
        let ours_counts = named.is_none();
        let strategy = named
            .or_else(|| ours("LOWTIDE_STRATEGY"))
            .unwrap_or_else(|| DEFAULT_STRATEGY.to_owned());
        let pytorch = || {
            let set = PYTORCH_VARIABLES.into_iter().find_map(&variable);
            set.filter(|_| strategy == "caching")
        };
        let conf = self.conf.clone();
        let conf = conf.or_else(|| ours("LOWTIDE_CONF").filter(|_| ours_counts));
        Config::parse(&strategy, &conf.or_else(pytorch).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(choice: (Option<&str>, Option<&str>), environment: &[(&str, &str)]) -> String {
        let choice = Choice {
            strategy: choice.0.map(str::to_owned),
            conf: choice.1.map(str::to_owned),
        };
        let variable = |name: &str| {
            let found = environment.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        match choice.resolve(variable) {
            Ok(config) => config.to_string(),
            Err(error) => error.to_string(),
        }
    }

    const PYTORCH: (&str, &str) = ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64");

    #[test]
    fn the_environment_decides_where_the_program_does_not() {
        let nothing = (None, None);
        assert_eq!(resolved(nothing, &[]), "caching");
        assert_eq!(
            resolved(nothing, &[PYTORCH]),
            "caching:max_split_size_mb:64"
        );
        let bfc = ("LOWTIDE_STRATEGY", "bfc");
        assert_eq!(resolved(nothing, &[bfc, PYTORCH]), "bfc");
        let conf = ("LOWTIDE_CONF", "expandable_segments:True");
        assert_eq!(
            resolved(nothing, &[conf, PYTORCH]),
            "caching:expandable_segments:True"
        );
        let empty = [("LOWTIDE_CONF", ""), ("LOWTIDE_STRATEGY", ""), PYTORCH];
        assert_eq!(resolved(nothing, &empty), "caching:max_split_size_mb:64");
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
    fn without_pytorch_the_environment_is_ours_alone() {
        let chosen = |environment: &[(&str, &str)]| {
            let variable = |name: &str| {
                let found = environment.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let choice = Choice::of_environment_alone(variable);
            choice.resolve(variable).unwrap().to_string()
        };
        assert_eq!(chosen(&[PYTORCH]), "caching");
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
            resolved(nothing, &[last]),
            "caching:expandable_segments:True"
        );
        assert_eq!(
            resolved(nothing, &[("PYTORCH_HIP_ALLOC_CONF", ""), last]),
            "caching"
        );
        assert!(resolved(nothing, &[("LOWTIDE_STRATEGY", "best")]).contains("'best'"));
    }
}
