//! The options of PyTorch's caching allocator.

use crate::config::error::ConfigError;
use crate::config::options::{LastTry, Options};
use crate::config::tokens::{self, Reader};
use crate::units::{Bytes, TorchRelease};

/// The options of `PYTORCH_CUDA_ALLOC_CONF` that decide which memory serves a request. The defaults are
/// PyTorch's.
///
/// The other options are parsed and checked, but have no effect: pinned host memory, locking, and how many
/// addresses an expandable segment reserves.
#[derive(Clone, PartialEq, Debug)]
pub struct CachingConfig {
    /// Blocks of this size and larger are never split. `None` if every block may be split. At least
    /// [`CachingConfig::large_segment_size`].
    pub max_split_size: Option<Bytes>,
    /// A block that cannot be split serves a request if it is larger by less than this. The default, and the
    /// smallest value, is [`CachingConfig::large_segment_size`].
    pub max_non_split_rounding: Bytes,
    /// The size of the segments for requests above 1 MiB and below 10 MiB. Also the page size of large expandable
    /// segments.
    pub large_segment_size: Bytes,
    /// The fraction of the memory limit above which unused segments are released before a new one is allocated,
    /// in (0.0, 1.0). 0.0 means never.
    pub garbage_collection_threshold: f64,
    /// For sizes from 1 MiB to 64 GiB: the number of steps between two powers of two to which a size is rounded
    /// up. 0 means no such rounding. [`CachingConfig::divisions_for`] returns the entry of a size.
    pub roundup_power2_divisions: [u64; 16],
    /// Whether segments grow by mapping memory instead of being allocated whole.
    pub expandable_segments: bool,
    /// The fraction of the device's memory that may be reserved, in [0.0, 1.0].
    pub per_process_memory_fraction: f64,
    /// Whether a request for new memory is rejected without a driver call if more than
    /// `per_process_memory_fraction` of the device would then be reserved. A limit that was set later does not
    /// change that.
    pub throw_on_cudamalloc_oom: bool,
    /// Whether a block that several streams used may be reused during a graph capture. With it, no thread may
    /// queue work in a stream of the capture while another thread allocates or frees memory.
    pub graph_capture_record_stream_reuse: bool,
    /// The order of free blocks of the same size. PyTorch has no such option; its releases differ. `None` means
    /// [`FreeBlockOrder::Address`], and in a replay the order of the recording.
    pub free_block_order: Option<FreeBlockOrder>,
    /// Whether a request that waited for other streams searches the free blocks once more before it fails.
    /// PyTorch does not, so such a request can fail although it fits (pytorch#189504). PyTorch has no such
    /// option. `None` means `false`, as in PyTorch, and `true` in a job that lowtide serves
    /// ([`Config::in_job`](crate::Config::in_job)).
    pub search_after_wait: Option<bool>,
}

/// The order of free blocks of the same size: the first one serves a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FreeBlockOrder {
    /// The lowest address first: PyTorch up to 2.11.
    #[default]
    Address,
    /// The oldest block first: PyTorch 2.12. If a block is split, its first part is a new block. If blocks are
    /// merged, the whole is as old as the block that was freed last.
    BlockAge,
    /// The block in the oldest segment first; of several there, the one at the lowest address: PyTorch from 2.13
    /// on.
    SegmentAge,
}

impl FreeBlockOrder {
    /// Every order, in the sequence of PyTorch's releases.
    pub const ALL: [FreeBlockOrder; 3] = [
        FreeBlockOrder::Address,
        FreeBlockOrder::BlockAge,
        FreeBlockOrder::SegmentAge,
    ];

    /// Returns the order in a release of PyTorch.
    pub fn of_torch(release: TorchRelease) -> FreeBlockOrder {
        match release {
            TorchRelease(..2, _) | TorchRelease(2, ..12) => FreeBlockOrder::Address,
            TorchRelease(2, 12) => FreeBlockOrder::BlockAge,
            _ => FreeBlockOrder::SegmentAge,
        }
    }

    /// Returns the order's name, as a value of the option `free_block_order`.
    pub const fn name(self) -> &'static str {
        match self {
            FreeBlockOrder::Address => "address",
            FreeBlockOrder::BlockAge => "block_age",
            FreeBlockOrder::SegmentAge => "segment_age",
        }
    }

    /// Returns the order called `name`.
    pub fn named(name: &str) -> Option<FreeBlockOrder> {
        { FreeBlockOrder::ALL.into_iter() }.find(|order| order.name() == name)
    }

    fn read(name: &str) -> Result<FreeBlockOrder, ConfigError> {
        FreeBlockOrder::named(name).ok_or_else(|| {
            let text = format!("free_block_order is address, block_age or segment_age, not {name}");
            ConfigError::new(text)
        })
    }
}

/// Block sizes are multiples of this.
const ROUNDING: Bytes = Bytes(512);

impl Default for CachingConfig {
    fn default() -> CachingConfig {
        CachingConfig {
            max_split_size: None,
            max_non_split_rounding: Bytes::mib(20),
            large_segment_size: Bytes::mib(20),
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; 16],
            expandable_segments: false,
            per_process_memory_fraction: 1.0,
            throw_on_cudamalloc_oom: false,
            graph_capture_record_stream_reuse: false,
            free_block_order: None,
            search_after_wait: None,
        }
    }
}

impl CachingConfig {
    /// Returns the number of rounding steps from the power of two below `size` to the next; 0 if it is not
    /// rounded that way.
    ///
    /// Sizes under 2 MiB share the first entry, sizes from 32 GiB the last.
    pub fn divisions_for(&self, size: Bytes) -> u64 {
        let exponent = size.get().checked_ilog2().unwrap_or(0);
        self.roundup_power2_divisions[exponent.saturating_sub(20).min(15) as usize]
    }

    /// Returns the size of a request's block. The request is rounded up to the next step between two powers of
    /// two if that option is set, otherwise to 512 bytes.
    pub fn block_size(&self, requested: Bytes) -> Bytes {
        let divisions = self.divisions_for(requested);
        let divides = divisions > 1 && requested.get() > ROUNDING.get().saturating_mul(divisions);
        if divides {
            round_up_to_division(requested, divisions)
        } else {
            requested.max(ROUNDING).round_up(ROUNDING)
        }
    }

    /// Returns the size of the new segment for a block of `block` bytes:
    ///
    /// - 2 MiB for a block of up to 1 MiB
    /// - [`CachingConfig::large_segment_size`] for a block below 10 MiB
    /// - the block's size rounded up to 2 MiB for a larger one
    pub fn segment_size(&self, block: Bytes) -> Bytes {
        if block <= Bytes::mib(1) {
            Bytes::mib(2)
        } else if block < Bytes::mib(10) {
            self.large_segment_size
        } else {
            block.round_up(Bytes::mib(2))
        }
    }

    /// Returns the size of an expandable segment's address range, a multiple of `page_size`. It is an eighth more
    /// than the device's memory, so that holes left by unmapping do not keep the segment from growing.
    ///
    /// # Panics
    ///
    /// If `page_size` is zero.
    pub fn expandable_segment_size(device_size: Bytes, page_size: Bytes) -> Bytes {
        Bytes(device_size.get() + device_size.get() / 8).round_up(page_size)
    }

    /// Returns whether a free block of `block` bytes may serve a request. If [`CachingConfig::max_split_size`] is
    /// set, blocks below it serve requests below it. Larger blocks are not split, so they serve only larger
    /// requests, and only if little is wasted.
    #[inline]
    pub fn block_serves(&self, block: Bytes, request: Bytes) -> bool {
        let Some(max) = self.max_split_size else {
            return true;
        };
        if request < max {
            block < max
        } else {
            block < request + self.max_non_split_rounding
        }
    }

    /// Returns these options with a text applied while the strategy runs; see
    /// [`Config::reconfigured`](crate::Config::reconfigured).
    pub(crate) fn reread(&self, reader: &mut Reader<'_>) -> Result<CachingConfig, ConfigError> {
        let mut config = CachingConfig {
            max_split_size: None,
            roundup_power2_divisions: [0; 16],
            garbage_collection_threshold: 0.0,
            ..self.clone()
        };
        config.read_large_segment_size(reader.clone())?;
        reader.pairs("CUDA", &KEYS, |key, reader| {
            Ok(config.set_placement(key, reader)? || set_ignored(key, reader)?)
        })?;
        Ok(config)
    }

    /// Reads `large_segment_size_mb`, wherever it is in the text, because two other options may not be below it.
    /// Also makes it the default of `max_non_split_rounding`.
    fn read_large_segment_size(&mut self, mut reader: Reader<'_>) -> Result<(), ConfigError> {
        while let Some(word) = reader.word() {
            if word == "large_segment_size_mb" {
                let mib = reader.mib()?;
                if mib <= 10 {
                    return Err(ConfigError::new(
                        "CachingAllocator option large_segment_size_mb must be > 10 MB",
                    ));
                }
                self.large_segment_size = Bytes::mib(mib);
                self.max_non_split_rounding = self.large_segment_size;
            }
        }
        Ok(())
    }

    /// Sets an option of this type. Returns whether `key` is one.
    fn set_placement(&mut self, key: &str, reader: &mut Reader<'_>) -> Result<bool, ConfigError> {
        match key {
            "large_segment_size_mb" => {
                reader.mib()?;
            }
            "max_split_size_mb" => self.max_split_size = Some(self.large_size(key, reader)?),
            "max_non_split_rounding_mb" => {
                self.max_non_split_rounding = self.large_size(key, reader)?;
            }
            "garbage_collection_threshold" => {
                self.garbage_collection_threshold = reader.decimal()?;
                if !(self.garbage_collection_threshold > 0.0
                    && self.garbage_collection_threshold < 1.0)
                {
                    return Err(ConfigError::new(
                        "garbage_collect_threshold is invalid, set it in (0.0, 1.0)",
                    ));
                }
            }
            "roundup_power2_divisions" => {
                read_divisions(&mut self.roundup_power2_divisions, reader)?;
            }
            "expandable_segments" => self.expandable_segments = reader.boolean()?,
            "per_process_memory_fraction" => {
                self.per_process_memory_fraction = reader.decimal()?;
                if !(0.0..=1.0).contains(&self.per_process_memory_fraction) {
                    return Err(ConfigError::new(
                        "per_process_memory_fraction is invalid, set it in [0.0, 1.0]",
                    ));
                }
            }
            "throw_on_cudamalloc_oom" => self.throw_on_cudamalloc_oom = reader.boolean()?,
            "graph_capture_record_stream_reuse" => {
                self.graph_capture_record_stream_reuse = reader.boolean()?;
            }
            "free_block_order" => {
                self.free_block_order = Some(FreeBlockOrder::read(reader.value()?)?);
            }
            "search_after_wait" => self.search_after_wait = Some(reader.boolean()?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Reads a size that may not be below `large_segment_size`.
    fn large_size(&self, key: &str, reader: &mut Reader<'_>) -> Result<Bytes, ConfigError> {
        let mib = reader.mib()?;
        let least = self.large_segment_size.get() >> 20;
        if mib < least {
            return Err(ConfigError::new(format!(
                "CachingAllocator option {key} too small, must be >= {least}"
            )));
        }
        Ok(Bytes::mib(mib))
    }
}

impl Options for CachingConfig {
    fn read(reader: &mut Reader<'_>) -> Result<CachingConfig, ConfigError> {
        CachingConfig::default().reread(reader)
    }

    fn pairs(&self) -> Vec<String> {
        let default = CachingConfig::default();
        let mut pairs = Vec::new();
        let mut pair = |differs: bool, text: String| {
            if differs {
                pairs.push(text);
            }
        };
        let mib = |size: Bytes| size.get() >> 20;
        pair(
            self.large_segment_size != default.large_segment_size,
            format!("large_segment_size_mb:{}", mib(self.large_segment_size)),
        );
        if let Some(size) = self.max_split_size {
            pair(true, format!("max_split_size_mb:{}", mib(size)));
        }
        pair(
            self.max_non_split_rounding != self.large_segment_size,
            format!(
                "max_non_split_rounding_mb:{}",
                mib(self.max_non_split_rounding)
            ),
        );
        pair(
            self.garbage_collection_threshold != default.garbage_collection_threshold,
            format!(
                "garbage_collection_threshold:{}",
                self.garbage_collection_threshold
            ),
        );
        pair(
            self.roundup_power2_divisions != default.roundup_power2_divisions,
            format!(
                "roundup_power2_divisions:{}",
                divisions_text(&self.roundup_power2_divisions)
            ),
        );
        pair(self.expandable_segments, "expandable_segments:True".into());
        pair(
            self.per_process_memory_fraction != default.per_process_memory_fraction,
            format!(
                "per_process_memory_fraction:{}",
                self.per_process_memory_fraction
            ),
        );
        pair(
            self.throw_on_cudamalloc_oom,
            "throw_on_cudamalloc_oom:True".into(),
        );
        pair(
            self.graph_capture_record_stream_reuse,
            "graph_capture_record_stream_reuse:True".into(),
        );
        if let Some(order) = self.free_block_order {
            pair(true, format!("free_block_order:{}", order.name()));
        }
        if let Some(searches) = self.search_after_wait {
            let value = if searches { "True" } else { "False" };
            pair(true, format!("search_after_wait:{value}"));
        }
        pairs
    }

    /// Garbage collection compares the free segments of all streams. `throw_on_cudamalloc_oom` rejects a request by the
    /// reserved bytes of all streams.
    fn keeps_streams_apart(&self) -> bool {
        self.garbage_collection_threshold == 0.0 && !self.throw_on_cudamalloc_oom
    }

    fn memory_fraction(&self) -> Option<f64> {
        Some(self.per_process_memory_fraction).filter(|&fraction| fraction < 1.0)
    }

    fn large_page(&self) -> Bytes {
        self.large_segment_size
    }

    fn rejects_above(&self) -> Option<f64> {
        self.throw_on_cudamalloc_oom
            .then(|| self.memory_fraction().unwrap_or(1.0))
    }

    fn reuses_in_capture(&self) -> bool {
        self.graph_capture_record_stream_reuse
    }

    fn expandable_segments(&self) -> Option<bool> {
        Some(self.expandable_segments)
    }

    fn last_try(&self) -> LastTry {
        if self.search_after_wait == Some(true) {
            LastTry::NewFirst
        } else {
            LastTry::NewOnly
        }
    }
}

/// The options, for a suggestion if one is mistyped. Those for pinned memory and for a lock have no effect here.
const KEYS: [&str; 13] = [
    "max_split_size_mb",
    "max_non_split_rounding_mb",
    "garbage_collection_threshold",
    "large_segment_size_mb",
    "roundup_power2_divisions",
    "expandable_segments",
    "per_process_memory_fraction",
    "throw_on_cudamalloc_oom",
    "graph_capture_record_stream_reuse",
    "free_block_order",
    "search_after_wait",
    "backend",
    "release_lock_on_cudamalloc",
];

/// Reads an option of PyTorch's that has no effect here. Returns whether `key` is one.
fn set_ignored(key: &str, reader: &mut Reader<'_>) -> Result<bool, ConfigError> {
    match key {
        "backend" => match reader.value()? {
            "native" => {}
            "cudaMallocAsync" => {
                return Err(ConfigError::new(
                    "backend:cudaMallocAsync is the driver's own pool, not a strategy of this \
                     allocator; only backend:native is supported",
                ));
            }
            _ => {
                return Err(ConfigError::new(
                    "Unknown allocator backend, options are native and cudaMallocAsync",
                ));
            }
        },
        // The first two concern when other threads wait, which a strategy does not decide.
        "release_lock_on_cudamalloc"
        | "release_lock_on_hipmalloc"
        | "pinned_use_cuda_host_register"
        | "pinned_use_hip_host_register"
        | "pinned_use_background_threads"
        | "pinned_free_catch_all" => {
            reader.boolean()?;
        }
        "pinned_num_register_threads" => check_register_threads(reader.number()?)?,
        "pinned_reserve_segment_size_mb" => {
            if reader.number()? == 0 {
                return Err(ConfigError::new(
                    "Pinned reserve segment size has to be greater than 0",
                ));
            }
        }
        "pinned_max_round_threshold_mb" | "pinned_max_cached_size_mb" => {
            reader.number()?;
        }
        // PyTorch warns about a wrong value and uses its default, so only the syntax is checked.
        "expandable_segments_reserve" => {
            reader.value()?;
        }
        "expandable_segments_reserve_by_class" => {
            reader.separator(":")?;
            reader.separator("[")?;
            read_list(reader, |_, reader| reader.required().map(drop))?;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn check_register_threads(count: u64) -> Result<(), ConfigError> {
    const MAX: u64 = 128;
    if !count.is_power_of_two() {
        return Err(ConfigError::new(format!(
            "Number of register threads has to be power of 2, got {count}"
        )));
    }
    if count > MAX {
        return Err(ConfigError::new(format!(
            "Number of register threads should be less than or equal to {MAX}, got {count}"
        )));
    }
    Ok(())
}

/// Reads one number for all sizes, or a list of numbers by size.
///
/// In a list, the first entry also applies to all smaller sizes. The entry `>` applies to all sizes above the
/// entry before it. A size without an entry keeps its value.
fn read_divisions(divisions: &mut [u64; 16], reader: &mut Reader<'_>) -> Result<(), ConfigError> {
    let value = reader.value()?;
    if value != "[" {
        let steps = tokens::whole_number(value)?;
        if !steps.is_power_of_two() {
            return Err(ConfigError::new(
                "For roundups, the divisions has to be power of 2 ",
            ));
        }
        *divisions = [steps; 16];
        return Ok(());
    }

    let mut previous = None;
    let mut last = 0;
    read_list(reader, |size, reader| {
        let steps = tokens::whole_number(reader.required()?)?;
        if steps != 0 && !steps.is_power_of_two() {
            return Err(ConfigError::new(
                "For roundups, the divisions has to be power of 2 or 0 to disable roundup ",
            ));
        }
        if size == ">" {
            divisions[last + 1..].fill(steps);
            return Ok(());
        }
        let mib = tokens::whole_number(size)?;
        if !mib.is_power_of_two() {
            return Err(ConfigError::new(
                "For roundups, the intervals have to be power of 2 ",
            ));
        }
        last = mib.ilog2().min(15) as usize;
        match previous.replace(last) {
            None => divisions[..=last].fill(steps),
            Some(_) => divisions[last] = steps,
        }
        Ok(())
    })
}

/// Reads `name:value` entries up to the closing bracket. `set` receives the name and reads the value.
fn read_list<'a>(
    reader: &mut Reader<'a>,
    mut set: impl FnMut(&str, &mut Reader<'a>) -> Result<(), ConfigError>,
) -> Result<(), ConfigError> {
    loop {
        let Some(name) = reader.word() else {
            return Err(ConfigError::new(
                "Expected closing bracket ']' in ConfigTokenizer but reached end of config",
            ));
        };
        if name == "]" {
            return Ok(());
        }
        reader.separator(":")?;
        set(name, reader)?;
        if reader.peek() != Some("]") {
            reader.separator(",")?;
        }
    }
}

/// Returns the shortest text from which [`read_divisions`] makes `divisions`, starting from all zeros.
fn divisions_text(divisions: &[u64; 16]) -> String {
    let (first, last) = (divisions[0], divisions[15]);
    let head = divisions
        .iter()
        .take_while(|&&steps| steps == first)
        .count();
    if head == divisions.len() {
        return first.to_string();
    }
    let tail = 16
        - divisions
            .iter()
            .rev()
            .take_while(|&&steps| steps == last)
            .count();

    let mut entries = vec![format!("{}:{first}", 1u64 << (head - 1))];
    for (index, &steps) in divisions.iter().enumerate().take(tail).skip(head) {
        // `>` fills all sizes after the entry before it, so the last size before the tail needs an entry.
        if steps != 0 || (index + 1 == tail && last != 0) {
            entries.push(format!("{}:{steps}", 1u64 << index));
        }
    }
    if last != 0 {
        entries.push(format!(">:{last}"));
    }
    format!("[{}]", entries.join(","))
}

/// Rounds up to the next of `divisions` equal steps between two powers of two. With 4 steps, 1200 becomes 1280.
/// `divisions` is a power of two.
fn round_up_to_division(size: Bytes, divisions: u64) -> Bytes {
    let floor = 1_u64 << size.get().ilog2();
    match floor / divisions {
        0 => Bytes(floor << 1),
        step => size.round_up(Bytes(step)),
    }
}
