//! A process's allocators: one for each device, made when the device is first used, and never ended.
//!
//! They are statics that nothing drops. When a process ends, its threads and other libraries may still
//! give memory back, while the driver may be gone already and has taken everything back itself.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock};

use lowtide_core::{
    Action, AllocError, Allocation, Config, DeviceAddress, DeviceAllocator, DriverError, Event,
    FreeBlockOrder, MempoolId, SearchHint, SegmentSnapshot, TorchRelease,
};
use lowtide_cuda::{CudaDriver, Library, PrimaryContexts};
use lowtide_explain::Configured;
use lowtide_shared::{Holder, Observer, OwnerTable, SharedAllocator, SharedDriver, SharedError};
use lowtide_trace::AllocatorSettings;

use crate::control;
use crate::environment::variable;
use crate::error::{Error, Status};
use crate::events::EventListener;
use crate::fork;
use crate::publish;
use crate::record::{self, Recorder};
use crate::regions::{self, RegionPool};
use crate::settings::Choice;
use crate::shortage::ShortageListener;
use crate::tms;

/// One device's allocator.
pub(crate) type Allocator = SharedAllocator<CudaDriver>;

/// The part of a device's allocator that serves some of its streams.
pub(crate) type Lane = DeviceAllocator<SharedDriver<CudaDriver>>;

/// More devices than a process can have; PyTorch's own limit is 120.
pub(crate) const DEVICES_MAX: usize = 128;

static DEVICES: [OnceLock<Allocator>; DEVICES_MAX] = [const { OnceLock::new() }; DEVICES_MAX];

/// Who holds which address, on every device.
static OWNERS: LazyLock<Arc<OwnerTable>> = LazyLock::new(Arc::default);

/// The device that was used first, or [`NO_DEVICE`]. The lane of its default stream has most blocks of most
/// jobs, and [`SEARCH_HINT`] knows where the search for one of those begins.
static FIRST_DEVICE: AtomicU8 = AtomicU8::new(NO_DEVICE);
const NO_DEVICE: u8 = u8::MAX;
static SEARCH_HINT: SearchHint = SearchHint::new();

/// Held while a device is prepared for use. Whoever holds it takes no lock of an allocator in use.
static SETUP: Mutex<Setup> = Mutex::new(Setup {
    choice: Choice {
        strategy: None,
        conf: None,
        is_of_environment: false,
    },
    torch: None,
    config: None,
    library: None,
    observer: None,
    recorder: None,
    shortage: None,
});

/// Held while something changes for the devices in use and those to come, so that all of them see the
/// changes in the same order. Taken before [`SETUP`], and by nobody who holds an allocator's lock.
static CHANGES: Mutex<()> = Mutex::new(());

/// Where the process's threads work.
static CONTEXTS: OnceLock<PrimaryContexts> = OnceLock::new();

/// What comes before the first allocator.
struct Setup {
    choice: Choice,
    /// The release of PyTorch that the memory is for.
    torch: Option<TorchRelease>,
    /// What the choice and the environment came to, once a device was used: it does not change any more.
    config: Option<Config>,
    /// The driver, once it was started.
    library: Option<Arc<Library>>,
    /// What a device's allocator is given when it is made.
    observer: Option<EventListener>,
    recorder: Option<Arc<Recorder>>,
    shortage: Option<ShortageListener>,
}

/// Returns a device's allocator, which is made if need be. What failed then is tried again the next time.
///
/// # Errors
///
/// If the process was forked, there is no driver or no such device, the driver fails, or the
/// configuration is refused.
#[inline]
pub(crate) fn device(ordinal: c_int) -> Result<&'static Allocator, Error> {
    match slot(ordinal).and_then(OnceLock::get) {
        Some(allocator) => Ok(allocator),
        None => start(ordinal),
    }
}

/// Returns a device's allocator, or `None` for a device that nothing was asked of. That one must not be
/// started by a question about it: its context takes hundreds of MiB, and on a machine with several devices
/// every process would take that of each. Nor the driver, which children that are forked after that cannot use: until
/// it is started, any number may be a device's.
///
/// # Errors
///
/// If the process was forked, or there is no such device, or no driver for a number that none can have.
pub(crate) fn in_use(ordinal: c_int) -> Result<Option<&'static Allocator>, Error> {
    if let Some(allocator) = in_use_or_none(ordinal)? {
        return Ok(Some(allocator));
    }
    let started = setup()?.library.clone();
    if started.is_none() && slot(ordinal).is_some() {
        return Ok(None);
    }
    let library = started.map_or_else(library, Ok)?;
    number_of(ordinal, library.device_count()?)?;
    Ok(None)
}

/// As [`in_use`], and `None` for a device that is not there, so that the driver need not be asked.
///
/// # Errors
///
/// If the process was forked.
pub(crate) fn in_use_or_none(ordinal: c_int) -> Result<Option<&'static Allocator>, Error> {
    Ok(slot(ordinal).and_then(OnceLock::get))
}

/// Returns the allocator of a device in use, whatever became of the process since.
pub(crate) fn known(ordinal: c_int) -> Option<&'static Allocator> {
    slot(ordinal)?.get()
}

/// Does something with the allocator of every device in use. One that fails does not keep the others from
/// it; the first error is the answer.
///
/// # Errors
///
/// If the process was forked, and what `act` returned.
pub(crate) fn for_each_in_use(
    act: impl Fn(c_int, &Allocator) -> Result<(), Error>,
) -> Result<(), Error> {
    let mut outcome = Ok(());
    for (ordinal, allocator) in devices_in_use()? {
        outcome = outcome.and(act(ordinal, allocator));
    }
    outcome
}

/// Returns the allocators of the devices in use, by number.
///
/// # Errors
///
/// If the process was forked.
pub(crate) fn devices_in_use() -> Result<impl Iterator<Item = (c_int, &'static Allocator)>, Error> {
    let devices = (0..).zip(&DEVICES);
    Ok(devices.filter_map(|(ordinal, slot)| Some((ordinal, slot.get()?))))
}

/// Returns the device that holds the block at `address`, and what `act` does with the part of its
/// allocator that does. Of a part that does not hold the block, which is asked only where several hold
/// memory close to each other, `act` is to say so.
///
/// # Errors
///
/// If the process was forked, no device holds such a block, or `act` fails.
#[expect(
    clippy::inline_always,
    reason = "a call costs a request a fortieth of its time"
)]
#[inline(always)]
pub(crate) fn with_block<R>(
    address: DeviceAddress,
    act: impl FnMut(&mut Lane) -> Result<R, AllocError>,
) -> Result<(c_int, R), Error> {
    if let Holder::One(owner) = OWNERS.find(address)
        && let Some(allocator) = DEVICES[usize::from(owner.device)].get()
    {
        // A lock keeps all that comes after it waiting; what is looked at first can be on its way. By the
        // branch the processor guesses whose the block is, and need not wait for the answer either.
        if owner.lane == 0 && owner.device == FIRST_DEVICE.load(Ordering::Relaxed) {
            prefetch(SEARCH_HINT.place_of(address));
        }
        return Ok((owner.device.into(), allocator.with_lane(owner.lane, act)?));
    }
    with_block_of_any(address, act)
}

/// Has the processor fetch memory that is about to be looked at, where it has an instruction for that.
#[inline]
fn prefetch(place: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every such processor has the instruction. It does nothing but fetch, and ignores a place where
    // there is no memory.
    unsafe {
        _mm_prefetch::<_MM_HINT_T0>(ptr::without_provenance(place));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

#[cold]
fn with_block_of_any<R>(
    address: DeviceAddress,
    mut act: impl FnMut(&mut Lane) -> Result<R, AllocError>,
) -> Result<(c_int, R), Error> {
    for (ordinal, allocator) in devices_in_use()? {
        match allocator.with_block(address, &mut act) {
            Err(SharedError::Alloc(AllocError::NotAllocated { .. })) => {}
            outcome => return Ok((ordinal, outcome?)),
        }
    }
    Err(AllocError::NotAllocated { address }.into())
}

/// Returns the block that starts at `address`, and the device that holds it.
///
/// # Errors
///
/// As [`with_block`].
pub(crate) fn find_allocation(address: DeviceAddress) -> Result<(c_int, Allocation), Error> {
    with_block(address, |lane| lane.allocation(address))
}

/// Returns the segment that an address lies in, and the device that has it. Linear in the blocks.
///
/// # Errors
///
/// As [`with_block`].
pub(crate) fn find_segment(address: DeviceAddress) -> Result<(c_int, SegmentSnapshot), Error> {
    with_block(address, |lane| {
        let contains = |segment: &SegmentSnapshot| {
            (segment.address..segment.address + segment.size).contains(&address)
        };
        let found = lane.segments().into_iter().find(contains);
        found.ok_or(AllocError::NotAllocated { address })
    })
}

/// Tells an observer of the events of every device, or nobody.
///
/// # Errors
///
/// If the process was forked.
pub(crate) fn observe_events(observer: Option<EventListener>) -> Result<(), Error> {
    let _in_order = lock(&CHANGES)?;
    let recorder = {
        let mut setup = setup()?;
        setup.observer = observer;
        setup.recorder.clone()
    };
    for_each_in_use(|ordinal, allocator| {
        let observer = combined(ordinal, observer, recorder.as_ref());
        Ok(allocator.observe_events(observer)?)
    })
}

/// Does something with the observer of events and the recorder, as far as they are there, which are not replaced
/// meanwhile.
///
/// # Errors
///
/// What `act` returned.
pub(crate) fn with_listeners(
    act: impl FnOnce(Option<EventListener>, Option<&Recorder>) -> Result<(), Error>,
) -> Result<(), Error> {
    let _in_order = lock(&CHANGES)?;
    let (observer, recorder) = {
        let setup = setup()?;
        (setup.observer, setup.recorder.clone())
    };
    act(observer, recorder.as_deref())
}

/// Has a new recorder told of the events of every device, from what each holds now on.
///
/// # Errors
///
/// If the process was forked, there is a recorder already, or `make` fails. Nothing is recorded then.
pub(crate) fn start_recording(
    make: impl FnOnce() -> Result<Arc<Recorder>, Error>,
) -> Result<(), Error> {
    let in_order = lock(&CHANGES)?;
    let (recorder, observer, settings) = {
        let mut setup = setup()?;
        let known = setup.recorder.as_ref();
        if known.is_some_and(|recorder| recorder.is_of_this_process()) {
            let text = "a recording is being made already: stop it first";
            return Err(Error::new(Status::Started, text));
        }
        let recorder = make()?;
        setup.recorder = Some(Arc::clone(&recorder));
        let settings = { setup.config.as_ref() }
            .map(|config| control::recorded_settings(config, setup.order()));
        (recorder, setup.observer, settings.unwrap_or_default())
    };
    let begun = for_each_in_use(|ordinal, allocator| {
        allocator.observe_events(combined(ordinal, observer, Some(&recorder)))?;
        let pools = regions::pools_on(ordinal)?;
        begin_recording(&recorder, ordinal, allocator, settings.clone(), &pools)
    });
    if begun.is_err() {
        // The first error says why there is none; half a recording would be taken for a whole one.
        let _ = end_recording(in_order);
    }
    begun
}

/// Has a recorder record a device from what it holds now on. The pools are those of regions, of whose pauses nobody
/// is told meanwhile.
fn begin_recording(
    recorder: &Recorder,
    ordinal: c_int,
    allocator: &Allocator,
    settings: AllocatorSettings,
    pools: &BTreeMap<MempoolId, RegionPool>,
) -> Result<(), Error> {
    let device = number_in_use(ordinal);
    // Under the locks under which all is told, so that nothing is both held before and told.
    Ok(allocator.with_all(|lanes| {
        let held = lanes.segments();
        let away = held.iter().filter_map(|segment| {
            let region = pools.get(&segment.pool)?;
            region.away_since_us?;
            Some((Arc::clone(&region.tag), pause_event(true, segment)))
        });
        let away = away.collect();
        recorder.begin(device, settings, held, away);
    })?)
}

/// Returns what is told of a segment whose memory leaves, or is back.
pub(crate) fn pause_event(is_leaving: bool, segment: &SegmentSnapshot) -> Event {
    Event {
        action: match is_leaving {
            true => Action::SegmentPaused,
            false => Action::SegmentResumed,
        },
        pool: segment.pool,
        address: segment.address,
        size: segment.size,
        stream: segment.stream,
    }
}

/// Has no recorder told of events any more, and completes what the one that was has recorded.
///
/// # Errors
///
/// If the process was forked, or the recording ended before.
pub(crate) fn stop_recording() -> Result<(), Error> {
    end_recording(lock(&CHANGES)?)
}

fn end_recording(in_order: MutexGuard<'static, ()>) -> Result<(), Error> {
    let (recorder, observer) = {
        let mut setup = setup()?;
        (setup.recorder.take(), setup.observer)
    };
    let forgotten = for_each_in_use(|ordinal, allocator| {
        Ok(allocator.observe_events(combined(ordinal, observer, None))?)
    });
    // The file may take its time, and nobody else is to wait for it.
    drop(in_order);
    let recorder = recorder.filter(|recorder| recorder.is_of_this_process());
    recorder
        .map_or(Ok(()), |recorder| recorder.end())
        .and(forgotten)
}

/// Returns who is told of a device's events.
fn combined(
    ordinal: c_int,
    observer: Option<EventListener>,
    recorder: Option<&Arc<Recorder>>,
) -> Option<Observer> {
    let observer = observer.map(|observer| observer.of_device(ordinal));
    let recorder = recorder.map(|recorder| recorder.of_device(number_in_use(ordinal)));
    match (observer, recorder) {
        (Some(observer), Some(recorder)) => Some(Arc::new(move |events: &[_]| {
            recorder(events);
            observer(events);
        })),
        (observer, recorder) => observer.or(recorder),
    }
}

/// Lets someone be asked for memory when a device is short of it, or nobody.
///
/// # Errors
///
/// If the process was forked.
pub(crate) fn on_shortage(shortage: Option<ShortageListener>) -> Result<(), Error> {
    let _in_order = lock(&CHANGES)?;
    setup()?.shortage = shortage;
    for_each_in_use(|ordinal, allocator| {
        let shortage = shortage.map(|shortage| shortage.of_device(ordinal));
        Ok(allocator.on_shortage(shortage)?)
    })
}

/// Changes the options while devices may be in use, and settles the configuration.
///
/// # Errors
///
/// If the process was forked, or the options are refused; nothing has changed then.
pub(crate) fn reconfigure(settings: &str) -> Result<(), Error> {
    let _in_order = lock(&CHANGES)?;
    let mut setup = setup()?;
    let order = setup.order();
    // What nobody asked for is not told to be asked for.
    let config = setup.config()?.reconfigured(settings, order)?;
    setup.config = Some(config.clone());
    drop(setup);
    let ordered = config.in_order(order).in_job();
    for_each_in_use(|_, allocator| Ok(allocator.reconfigure(&ordered)?))
}

/// Sets what the program asks for, where a device is not in use yet.
///
/// # Errors
///
/// If one is, the process was forked, or the configuration is refused, which then stays what it was.
pub(crate) fn configure(choice: Choice) -> Result<(), Error> {
    let mut setup = setup()?;
    setup.refuse_settled()?;
    choice.resolve(variable)?;
    setup.choice = choice;
    Ok(())
}

/// Sets which release of PyTorch the memory is for.
///
/// # Errors
///
/// If a device is in use, or the process was forked.
pub(crate) fn set_torch(release: TorchRelease) -> Result<(), Error> {
    let mut setup = setup()?;
    setup.refuse_settled()?;
    setup.torch = Some(release);
    Ok(())
}

/// Returns the release of PyTorch that the memory is for, if it is for one.
pub(crate) fn torch() -> Result<Option<TorchRelease>, Error> {
    Ok(setup()?.torch)
}

/// Returns the configuration, which is settled by that.
///
/// # Errors
///
/// If it is refused.
pub(crate) fn config() -> Result<Config, Error> {
    setup()?.config().cloned()
}

/// Returns what recordings say of the configuration, which is settled by that.
///
/// # Errors
///
/// If it is refused.
pub(crate) fn recorded_settings() -> Result<AllocatorSettings, Error> {
    let config = config()?;
    Ok(control::recorded_settings(&config, order()?))
}

/// Returns which of several free blocks of a size `caching` takes where no option says.
pub(crate) fn order() -> Result<Option<FreeBlockOrder>, Error> {
    Ok(setup()?.order())
}

/// Returns what a user changes to have another strategy or other options than those in force.
pub(crate) fn configured() -> Result<Configured, Error> {
    Ok(setup()?.choice.configured(variable))
}

/// Starts the driver, if it has not been.
///
/// # Errors
///
/// If the process was forked, or there is no driver that works.
pub(crate) fn start_driver() -> Result<(), Error> {
    library().map(drop)
}

/// Returns the driver, which is started if it has not been.
///
/// # Errors
///
/// If the process was forked, or there is no driver that works.
pub(crate) fn library() -> Result<Arc<Library>, Error> {
    setup()?.library().cloned()
}

/// Returns where the process's threads work. Starts the driver.
///
/// # Errors
///
/// If the process was forked, there is no driver that works, or it fails.
#[inline]
pub(crate) fn contexts() -> Result<&'static PrimaryContexts, Error> {
    match CONTEXTS.get() {
        Some(contexts) => Ok(contexts),
        None => find_contexts(),
    }
}

#[cold]
fn find_contexts() -> Result<&'static PrimaryContexts, Error> {
    let contexts = PrimaryContexts::new(library()?)?;
    Ok(CONTEXTS.get_or_init(|| contexts))
}

/// Returns whether the driver says that it has ended, as it does before the process: it has taken all
/// memory back then.
pub(crate) fn is_driver_gone(error: &AllocError) -> bool {
    const DEINITIALIZED: i32 = 4;
    matches!(
        error,
        AllocError::Driver(DriverError::Failed {
            code: DEINITIALIZED,
            ..
        })
    )
}

#[cold]
fn start(ordinal: c_int) -> Result<&'static Allocator, Error> {
    // Without any lock: it may enter a region, which the device is then prepared for.
    tms::start_if_named();
    let allocator = make(ordinal)?;
    // Without any lock: what is shown first is asked for here.
    publish::start();
    Ok(allocator)
}

fn make(ordinal: c_int) -> Result<&'static Allocator, Error> {
    let mut setup = setup()?;
    let config = setup.config()?.clone();
    let library = setup.library()?;
    let number = number_of(ordinal, library.device_count()?)?;
    let slot = &DEVICES[usize::from(number)];
    if let Some(allocator) = slot.get() {
        // Another thread was faster.
        return Ok(allocator);
    }
    let device = library.device(number.into())?;
    // SAFETY: 1. the driver goes into an allocator, which gives it only what it got from it. 2. Streams
    // are the callers', who promise that they exist. 3. No one resets the primary context while its
    // memory is in use, which CUDA's documentation asks of every program.
    let driver = unsafe { CudaDriver::new(device) }?;
    let ordered = config.clone().in_order(setup.order()).in_job();
    let allocator = SharedAllocator::new(driver, number, &ordered, Arc::clone(&OWNERS));
    let recorder = record::of_process(setup.recorder.take());
    setup.recorder.clone_from(&recorder);
    let observer = combined(ordinal, setup.observer, recorder.as_ref());
    allocator.observe_events(observer)?;
    let shortage = setup.shortage.map(|shortage| shortage.of_device(ordinal));
    allocator.on_shortage(shortage)?;
    let _attached = regions::attach(ordinal, &allocator)?;
    if let Some(recorder) = &recorder {
        // Last: a device that could not be made is tried again, and begins once.
        begin_recording(
            recorder,
            ordinal,
            &allocator,
            control::recorded_settings(&config, setup.order()),
            &BTreeMap::new(),
        )?;
    }
    if FIRST_DEVICE.load(Ordering::Relaxed) == NO_DEVICE {
        allocator.with_lane(0, |lane| {
            lane.keep_search_hint(&SEARCH_HINT);
            Ok(())
        })?;
        FIRST_DEVICE.store(number, Ordering::Relaxed);
    }
    Ok(slot.get_or_init(|| allocator))
}

impl Setup {
    fn refuse_settled(&self) -> Result<(), Error> {
        if self.config.is_some() {
            let text = "lowtide is in use already: configure it before the first request";
            return Err(Error::new(Status::Started, text));
        }
        Ok(())
    }

    /// Returns which of several free blocks of a size `caching` takes where no option says.
    fn order(&self) -> Option<FreeBlockOrder> {
        self.torch.map(FreeBlockOrder::of_torch)
    }

    fn config(&mut self) -> Result<&Config, Error> {
        let config = match self.config.take() {
            Some(config) => config,
            None => self.choice.resolve(variable)?,
        };
        Ok(self.config.insert(config))
    }

    fn library(&mut self) -> Result<&Arc<Library>, Error> {
        let library = match self.library.take() {
            Some(library) => library,
            None => {
                fork::watch()?;
                Library::load()?
            }
        };
        Ok(self.library.insert(library))
    }
}

fn setup() -> Result<MutexGuard<'static, Setup>, Error> {
    lock(&SETUP)
}

fn lock<T>(mutex: &'static Mutex<T>) -> Result<MutexGuard<'static, T>, Error> {
    mutex.lock().map_err(|_| {
        let text = "lowtide stopped: it panicked when a device was first used, or changed";
        Error::new(Status::Internal, text)
    })
}

/// Returns the number of a device, of which the driver shows `count`.
fn number_of(ordinal: c_int, count: u32) -> Result<u8, Error> {
    let number = u8::try_from(ordinal).ok();
    let is_there = |&number: &u8| u32::from(number) < count && usize::from(number) < DEVICES_MAX;
    number.filter(is_there).ok_or_else(|| {
        let text = format_args!("there is no device {ordinal}: the driver shows {count}");
        Error::new(Status::InvalidArgument, text)
    })
}

/// Returns the number of a device in use.
pub(crate) fn number_in_use(ordinal: c_int) -> u8 {
    u8::try_from(ordinal).expect("devices in use have a place, of which there are fewer")
}

fn slot(ordinal: c_int) -> Option<&'static OnceLock<Allocator>> {
    DEVICES.get(usize::try_from(ordinal).ok()?)
}
