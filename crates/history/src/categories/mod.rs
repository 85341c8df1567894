//! The categories of a job's memory.

mod makers;

use std::ops::Index;

use hashbrown::{HashMap, HashSet};
use lowtide_core::Bytes;
use lowtide_trace::{StackId, Trace};

use crate::callers::Callers;
use crate::history::{Block, History, Kept};
use crate::labels::Labels;
use crate::numbering::Numbering;
use makers::{Maker, Makers};

/// What memory is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Category {
    /// Parameters and buffers of modules.
    Parameters,
    /// Gradients of parameters.
    Gradients,
    /// What optimizers keep between steps, such as Adam's moments.
    OptimizerState,
    /// What a forward pass makes and the backward pass needs. In a job without a backward pass, what a forward pass
    /// makes.
    Activations,
    /// What the program makes before a forward pass and holds during it.
    Inputs,
    /// Keys and values of earlier tokens.
    KvCache,
    /// What a forward pass, a backward pass or an optimizer's step frees itself.
    Temporaries,
    /// Memory that libraries work in, such as cuBLAS's.
    Workspaces,
    /// What neither a stack nor the lifetime shows.
    Unknown,
}

/// The sizes of cuBLAS's workspace: on GPUs before and since compute capability 9.0, and that of cuBLASLt. See
/// `CUBLAS_WORKSPACE_CONFIG` in PyTorch's documentation.
const WORKSPACE_SIZES: [Bytes; 3] = [Bytes(8_519_680), Bytes::mib(32), Bytes::mib(1)];

/// The most backward passes that a batch is held for: a batch may be loaded during the step before its own.
const INPUT_PASSES_MAX: usize = 2;

/// The category of each block of a job.
///
/// A program on lowtide can write them into its recording (`lowtide.categorize`). Otherwise, each follows from the code that
/// allocated a block, and from what ran while the program held it. For example, what an optimizer's step made and did not free is its state. What a forward pass made and
/// the backward pass found is an activation.
#[derive(Clone, Debug)]
pub struct Categories {
    /// In the order of [`History::blocks`].
    by_block: Vec<Category>,
    /// The number of each block's module.
    modules: Vec<u32>,
    /// The paths of modules, by their numbers; the first is empty.
    paths: Vec<String>,
    are_shown: bool,
}

/// The bytes and blocks of each category at one instant.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Held([Kept; Category::ALL.len()]);

impl Category {
    /// Every category, in the order of reports.
    pub const ALL: [Category; 9] = [
        Category::Parameters,
        Category::Gradients,
        Category::OptimizerState,
        Category::Activations,
        Category::Inputs,
        Category::KvCache,
        Category::Temporaries,
        Category::Workspaces,
        Category::Unknown,
    ];

    fn named(name: &str) -> Option<Category> {
        Category::ALL
            .into_iter()
            .find(|category| category.name() == name)
    }

    /// Returns the name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::OptimizerState => "optimizer_state",
            Category::Activations => "activations",
            Category::Inputs => "inputs",
            Category::KvCache => "kv_cache",
            Category::Temporaries => "temporaries",
            Category::Workspaces => "workspaces",
            Category::Unknown => "unknown",
        }
    }
}

impl Categories {
    /// Returns the category of each block of `history`, the history of `trace`. Without stacks, all are unknown. O(n log n)
    /// for n events.
    pub fn of(trace: &Trace, history: &History) -> Categories {
        Categories::by_callers(trace, history, &Callers::of(trace))
    }

    /// Like [`Categories::of`], with the callers of `trace`.
    pub(crate) fn by_callers(trace: &Trace, history: &History, callers: &Callers) -> Categories {
        let labels = Labels::of(trace, history);
        let job = Job {
            makers: Makers::of(trace, callers, &labels),
            labels: &labels,
            trace,
            history,
        };
        let mut by_block: Vec<Category> = history
            .blocks
            .iter()
            .map(|block| job.said(block).unwrap_or_else(|| job.category(block)))
            .collect();
        job.divide_initial(&mut by_block);
        job.check(&mut by_block);
        let modules = history.blocks.iter().map(|block| job.module(block));
        let has_stack = |block: &Block| block.stack != StackId::NONE;
        Categories {
            modules: modules.collect(),
            by_block,
            paths: labels.paths.clone(),
            are_shown: labels.exist() || history.blocks.iter().any(has_stack),
        }
    }

    /// Returns the bytes and blocks of each category that the program holds at `instant`, without what is paused. Linear
    /// time.
    pub fn held_at(&self, history: &History, instant: u32) -> Held {
        let mut held = Held::default();
        for (index, block) in history.held_at(instant) {
            held.0[self.by_block[index] as usize].add(block);
        }
        held
    }

    /// Returns whether stacks or the program show categories. If not, they are unknown, but for guesses by size.
    pub fn are_shown(&self) -> bool {
        self.are_shown
    }

    /// Returns the paths of the modules that the program named, in their order of first use. The first is empty: it is that
    /// of blocks without a module.
    pub fn module_paths(&self) -> &[String] {
        &self.paths
    }

    /// Returns the number of the module of the block with this index in [`History::blocks`], as in
    /// [`Categories::module_paths`].
    ///
    /// # Panics
    ///
    /// If there is no such block.
    pub fn module_of_block(&self, index: usize) -> u32 {
        self.modules[index]
    }

    /// Returns the paths of modules with `*` for numbers, so that the layers of a model are one, and for each of
    /// [`Categories::module_paths`] the number of its path among them.
    pub fn modules_without_numbers(&self) -> (Vec<String>, Vec<u32>) {
        let mut kinds = Numbering::default();
        let numbers = self.paths.iter().map(|path| {
            let names = path.split('.');
            let names = names.map(|name| name.parse::<u32>().map_or(name, |_| "*"));
            kinds.number(names.collect::<Vec<&str>>().join("."))
        });
        let numbers = numbers.collect();
        (kinds.into_values(), numbers)
    }

    /// Returns the category of the block with this index in [`History::blocks`].
    ///
    /// # Panics
    ///
    /// If there is no such block.
    pub fn of_block(&self, index: usize) -> Category {
        self.by_block[index]
    }
}

impl Index<Category> for Held {
    type Output = Kept;

    fn index(&self, category: Category) -> &Kept {
        &self.0[category as usize]
    }
}

/// A job whose blocks are put into categories.
struct Job<'a> {
    makers: Makers<'a>,
    labels: &'a Labels,
    trace: &'a Trace,
    history: &'a History,
}

impl Job<'_> {
    /// Returns the category that the program named.
    fn said(&self, block: &Block) -> Option<Category> {
        let name = self.labels.of_block(block).category.as_deref();
        name.and_then(Category::named)
    }

    /// Returns the category of a block by its maker and its lifetime.
    fn category(&self, block: &Block) -> Category {
        match self.makers.of_block(block) {
            _ if is_bare_initial(block) => Category::Unknown,
            Maker::Unknown => Category::Unknown,
            Maker::Library => Category::Workspaces,
            Maker::Setup if self.survives(block, |maker| maker == Maker::Setup) => {
                Category::Parameters
            }
            Maker::KvCache if self.passes_over(block) > 0 => Category::Activations,
            Maker::KvCache => Category::KvCache,
            Maker::Optimizer if self.survives(block, |maker| maker == Maker::Optimizer) => {
                Category::OptimizerState
            }
            Maker::Backward if self.survives(block, Maker::is_of_backward) => Category::Gradients,
            Maker::Recomputation if self.survives(block, |maker| maker == Maker::Recomputation) => {
                Category::Activations
            }
            Maker::Setup | Maker::Optimizer | Maker::Backward | Maker::Recomputation => {
                Category::Temporaries
            }
            Maker::Forward => self.of_forward(block),
            Maker::Program => self.of_program(block),
        }
    }

    /// Returns the number of the module that a block belongs to, or else of the one that made it.
    fn module(&self, block: &Block) -> u32 {
        match self.labels.of_block(block).module {
            0 => self.makers.module_of(block),
            module => module,
        }
    }

    /// Returns whether something else than `own` makes a request while the program holds a block, or frees the block; or
    /// whether nothing frees it.
    fn survives(&self, block: &Block, own: impl Fn(Maker) -> bool) -> bool {
        if block.freed > self.history.events {
            return true;
        }
        // A block that was freed before the first event has no event.
        let free = block
            .freed
            .checked_sub(1)
            .map(|index| &self.trace.events[index as usize]);
        free.and_then(|free| self.makers.of_free(free))
            .is_some_and(|maker| !own(maker))
            || self
                .makers
                .next(block.start, |maker| maker.runs() && !own(maker))
                < block.freed
    }

    /// Returns the number of backward passes that begin while the program holds a block.
    fn passes_over(&self, block: &Block) -> usize {
        let [start, freed] = [block.start, block.freed].map(|at| self.makers.passes_before(at));
        freed - start
    }

    fn of_forward(&self, block: &Block) -> Category {
        let is_inference = !self.makers.has(Maker::Backward);
        match self.passes_over(block) {
            0 if is_inference || block.freed > self.history.events => Category::Activations,
            0 => Category::Temporaries,
            passes if passes > INPUT_PASSES_MAX => Category::Unknown,
            _ => Category::Activations,
        }
    }

    fn of_program(&self, block: &Block) -> Category {
        let passes = self.passes_over(block);
        let is_kept = passes > INPUT_PASSES_MAX;
        let last = self
            .makers
            .last(block.start, |maker| maker.runs() && maker != Maker::Program);
        match last {
            _ if is_kept => Category::Unknown,
            Some((_, Maker::Forward)) if passes > 0 => Category::Activations,
            _ if self
                .makers
                .next(block.start, |maker| maker.runs() && maker != Maker::Program)
                < block.freed =>
            {
                Category::Inputs
            }
            _ => Category::Temporaries,
        }
    }

    /// Returns whether the program holds a block for longer than an activation is needed: past the backward pass or, if
    /// there is none, past the next forward pass.
    fn is_overdue(&self, block: &Block) -> bool {
        if self.makers.has(Maker::Backward) {
            let is_of_backward = self.makers.of_block(block).is_of_backward();
            return self.passes_over(block) > usize::from(!is_of_backward);
        }
        let end = self
            .makers
            .next(block.start, |maker| maker == Maker::Program);
        self.makers.next(end, |maker| maker == Maker::Forward) < block.freed
    }

    /// Returns whether backward made a block and did not free it before its last request, if nothing else shows what freed
    /// it.
    fn outlives_pass(&self, block: &Block) -> bool {
        !self.makers.frees_are_known
            && self.makers.of_block(block) == Maker::Backward
            && self.makers.end_of_pass(block.start) < block.freed
    }

    /// Corrects what stacks of Python's functions alone do not show. A gradient is as large as a parameter; what a library
    /// works in is neither; and a call whose memory is kept makes no inputs.
    fn check(&self, by_block: &mut [Category]) {
        let of = |category: Category, by_block: &[Category]| {
            let blocks = self.history.blocks.iter().zip(by_block);
            let chosen = blocks.filter(|&(_, &of_block)| of_block == category);
            chosen.map(|(block, _)| *block).collect::<Vec<Block>>()
        };
        let parameters = of(Category::Parameters, by_block);
        let parameters: HashSet<Bytes> = parameters.iter().map(|block| block.requested).collect();
        let keepers = of(Category::Unknown, by_block);
        let mut keepers: HashSet<StackId> = keepers.iter().map(|block| block.stack).collect();
        keepers.remove(&StackId::NONE);
        let blocks = self.history.blocks.iter().zip(by_block);
        for (block, category) in blocks.filter(|(block, _)| self.said(block).is_none()) {
            let is_kept = block.freed > self.history.events;
            let is_workspace = is_kept && WORKSPACE_SIZES.contains(&block.requested);
            let is_parameter = parameters.contains(&block.requested);
            *category = match *category {
                Category::Unknown if is_workspace => Category::Workspaces,
                Category::Gradients if is_workspace && !is_parameter => Category::Workspaces,
                Category::Activations if is_workspace && self.is_overdue(block) => {
                    Category::Workspaces
                }
                Category::Gradients if !is_parameter && !parameters.is_empty() => Category::Unknown,
                Category::Temporaries if is_parameter && self.outlives_pass(block) => {
                    Category::Gradients
                }
                Category::Inputs | Category::Temporaries if keepers.contains(&block.stack) => {
                    Category::Unknown
                }
                other => other,
            };
        }
    }

    /// Divides what was there before the first event, without a stack, and is kept. For each gradient there is one parameter
    /// of its size. The rest of that size is the optimizer's state, if each parameter has as many such blocks. If the program
    /// names parameters, what it does not name is something else.
    fn divide_initial(&self, by_block: &mut [Category]) {
        if self.labels.have(Category::Parameters.name()) {
            return;
        }
        let mut initial: HashMap<Bytes, Vec<usize>> = HashMap::new();
        for (index, block) in self.history.blocks.iter().enumerate() {
            if is_bare_initial(block) && block.freed > self.history.events {
                initial.entry(block.requested).or_default().push(index);
            }
        }
        let gradients = self.gradients_of_a_pass(by_block);
        for (size, indices) in initial {
            let parameters = gradients.get(&size).copied().unwrap_or(0);
            let others = indices
                .len()
                .checked_rem(parameters)
                .unwrap_or(indices.len());
            if others > 0 && !WORKSPACE_SIZES.contains(&size) {
                continue;
            }
            let (divided, _) = indices.split_at(indices.len() - others);
            for (number, &index) in divided.iter().enumerate() {
                by_block[index] = if number < parameters {
                    Category::Parameters
                } else {
                    Category::OptimizerState
                };
            }
        }
    }

    /// Returns the number of gradients of each size that a backward pass usually makes.
    fn gradients_of_a_pass(&self, by_block: &[Category]) -> HashMap<Bytes, usize> {
        let mut in_passes: HashMap<Bytes, HashMap<usize, usize>> = HashMap::new();
        let blocks = self.history.blocks.iter().zip(by_block);
        for (block, _) in blocks.filter(|&(_, &category)| category == Category::Gradients) {
            let pass = self.makers.passes_before(block.start + 1);
            let passes = in_passes.entry(block.requested).or_default();
            *passes.entry(pass).or_default() += 1;
        }
        let median = |passes: HashMap<usize, usize>| {
            let mut counts: Vec<usize> = passes.into_values().collect();
            counts.sort_unstable();
            counts[counts.len() / 2]
        };
        let medians = in_passes
            .into_iter()
            .map(|(size, passes)| (size, median(passes)));
        medians.collect()
    }
}

/// Returns whether a block was there before the first event, and no stack shows what made it.
fn is_bare_initial(block: &Block) -> bool {
    block.start == 0 && block.stack == StackId::NONE
}
