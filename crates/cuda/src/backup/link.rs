//! The device's side of a backup: two streams, and a ring of page-locked slots between the device and the threads
//! that fill or empty them.

use std::mem;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use lowtide_core::{Bytes, DriverError};
use lowtide_region::BackupError;

use crate::backup::available;
use crate::backup::host_memory::HostMemory;
use crate::backup::layout::{Copy, Layout};
use crate::backup::release::ReleaseQueue;
use crate::backup::sizes::Sizes;
use crate::library::{Library, call};
use crate::sys::{
    CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING, CU_STREAM_NON_BLOCKING, CUevent, CUresult,
    CUstream,
};

/// The streams, slots and events for copies between the device and the host.
///
/// The device's context must be current in every thread that calls a method.
#[derive(Debug)]
pub(super) struct Link {
    queue: Arc<ReleaseQueue>,
    /// The stream for copies to and from page-locked memory.
    direct: CUstream,
    /// The stream for copies to and from slots, so that these do not wait for direct copies.
    staged: CUstream,
    slots: Arc<HostMemory>,
    /// The largest number of slots.
    slots_max: usize,
    /// The event after the last copy of each page-locked slot. Later slots are not in use yet: page-locking all of
    /// them at once would delay the first backup.
    events: Vec<CUevent>,
}

// SAFETY: streams and events belong to the process, and any thread may use them.
unsafe impl Send for Link {}
// SAFETY: as above, also from several threads at once.
unsafe impl Sync for Link {}

/// A link's events and streams, to be destroyed.
struct Made {
    events: Vec<CUevent>,
    streams: Vec<CUstream>,
}

// SAFETY: as above.
unsafe impl Send for Made {}

/// A slot of the ring. Only its owner uses the slot's memory.
#[derive(Debug)]
pub(super) struct Slot {
    number: usize,
    slots: Arc<HostMemory>,
}

/// A slot with device copies in progress.
#[derive(Debug)]
pub(super) struct Loading(Slot);

impl Slot {
    /// Returns the part of the slot for a span of a backup. The span must lie between two multiples of a slot's
    /// length in the backup, and has the same offset in the slot.
    pub(super) fn content(&mut self, span: &Range<usize>) -> &mut [u8] {
        let start = self.place(span.start);
        // SAFETY: 1. there is one `Slot` of each number, and it is borrowed for as long. 2. Its copies have ended:
        // while the device uses it, there is a `Loading` and no `Slot`.
        unsafe { self.slots.slice(start..start + span.len()) }
    }

    /// Returns the offset in the ring of an offset of the backup, while this slot holds it.
    fn place(&self, offset: usize) -> usize {
        let bytes = self.slots.block_bytes();
        self.number * bytes + offset % bytes
    }

    /// Like [`place`](Slot::place), as an address for the device.
    fn address(&self, offset: usize) -> usize {
        self.slots.address(self.place(offset))
    }
}

impl Loading {
    /// Returns the slot. Its copies must have ended.
    pub(super) fn into_slot(self) -> Slot {
        self.0
    }
}

/// The direction of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum Way {
    ToHost,
    ToDevice,
}

impl Link {
    pub(super) fn new(queue: Arc<ReleaseQueue>, sizes: &Sizes) -> Result<Link, BackupError> {
        let slots_max = slots_within(available::unpromised(), sizes);
        let ring_bytes = slots_max * sizes.piece_bytes;
        let mut link = Link {
            slots: Arc::new(HostMemory::map(
                Arc::clone(&queue),
                ring_bytes,
                sizes.piece_bytes,
            )?),
            queue,
            direct: ptr::null_mut(),
            staged: ptr::null_mut(),
            slots_max,
            events: Vec::new(),
        };
        link.direct = link.create_stream()?;
        link.staged = link.create_stream()?;
        Ok(link)
    }

    /// Returns how many bytes of the ring are page-locked.
    pub(super) fn locked_bytes(&self) -> usize {
        self.events.len() * self.slots.block_bytes()
    }

    /// Returns the largest number of slots.
    pub(super) fn slots_max(&self) -> usize {
        self.slots_max
    }

    /// Returns how many slots have been created.
    pub(super) fn slots(&self) -> usize {
        self.events.len()
    }

    /// Returns every slot that has been created.
    ///
    /// All slots that were returned earlier must have been dropped, and no copy may be in progress.
    pub(super) fn take_slots(&self) -> Vec<Slot> {
        (0..self.events.len())
            .map(|number| self.slot(number))
            .collect()
    }

    /// Creates one more slot.
    pub(super) fn add_slot(&mut self) -> Result<Slot, DriverError> {
        let number = self.events.len();
        let mut event = ptr::null_mut();
        // SAFETY: the call writes `event`, which outlives it.
        unsafe {
            call!(
                self.library(),
                cuEventCreate(
                    &raw mut event,
                    CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC
                )
            )
        }?;
        if let Err(error) = self.slots.lock(number) {
            self.release(vec![event], Vec::new());
            return Err(error);
        }
        self.events.push(event);
        Ok(self.slot(number))
    }

    /// Begins the copy of a span between the device and a slot.
    pub(super) fn begin_staged(
        &self,
        way: Way,
        slot: Slot,
        layout: &Layout,
        span: &Range<usize>,
    ) -> Result<Loading, DriverError> {
        for copy in layout.copies(span.clone()) {
            let address = slot.address(copy.offset);
            self.begin(way, self.staged, copy, address)?;
        }
        // Until the stream has finished this, the device uses the slot.
        // SAFETY: event and stream are this link's, of one context.
        unsafe {
            call!(
                self.library(),
                cuEventRecord(self.events[slot.number], self.staged)
            )
        }?;
        Ok(Loading(slot))
    }

    /// Returns whether the copies of a slot have ended.
    pub(super) fn has_ended(&self, loading: &Loading) -> Result<bool, DriverError> {
        let library = self.library();
        // SAFETY: the event is this link's.
        match unsafe { (library.functions.cuEventQuery)(self.events[loading.0.number]) } {
            CUresult::NOT_READY => Ok(false),
            result => library.check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits for the copies of a slot, and returns the slot.
    pub(super) fn end(&self, loading: Loading) -> Result<Slot, DriverError> {
        // SAFETY: the event is this link's.
        unsafe {
            call!(
                self.library(),
                cuEventSynchronize(self.events[loading.0.number])
            )
        }?;
        Ok(loading.into_slot())
    }

    /// Begins the copy of a span between the device and page-locked memory.
    pub(super) fn begin_direct(
        &self,
        way: Way,
        layout: &Layout,
        span: &Range<usize>,
        memory: &HostMemory,
    ) -> Result<(), DriverError> {
        let mut copies = layout.copies(span.clone());
        copies.try_for_each(|copy| self.begin(way, self.direct, copy, memory.address(copy.offset)))
    }

    /// Waits for every copy that was begun. After an error, some may still be in progress: their memory must stay
    /// until this has been called again and succeeds.
    pub(super) fn synchronize(&self) -> Result<(), DriverError> {
        for stream in [self.direct, self.staged] {
            // SAFETY: the stream is this link's.
            unsafe { call!(self.library(), cuStreamSynchronize(stream)) }?;
        }
        Ok(())
    }

    fn library(&self) -> &Library {
        self.queue.context().device().library()
    }

    fn slot(&self, number: usize) -> Slot {
        Slot {
            number,
            slots: Arc::clone(&self.slots),
        }
    }

    fn begin(
        &self,
        way: Way,
        stream: CUstream,
        copy: Copy,
        address: usize,
    ) -> Result<(), DriverError> {
        let (on_device, size) = (copy.address.get(), copy.size);
        match way {
            // SAFETY: 1. the host's address lies in memory that exists until the stream was waited for, and no one
            // uses that part of it. 2. The device's range was given to `CudaBackups`.
            Way::ToHost => unsafe {
                let host = ptr::with_exposed_provenance_mut(address);
                call!(
                    self.library(),
                    cuMemcpyDtoHAsync_v2(host, on_device, size, stream)
                )
            },
            // SAFETY: as above.
            Way::ToDevice => unsafe {
                let host = ptr::with_exposed_provenance(address);
                call!(
                    self.library(),
                    cuMemcpyHtoDAsync_v2(on_device, host, size, stream)
                )
            },
        }
    }

    fn create_stream(&self) -> Result<CUstream, DriverError> {
        let mut stream = ptr::null_mut();
        // SAFETY: the call writes `stream`, which outlives it.
        unsafe {
            call!(
                self.library(),
                cuStreamCreate(&raw mut stream, CU_STREAM_NON_BLOCKING)
            )
        }?;
        Ok(stream)
    }

    /// Destroys events and streams of this link, which no one uses after this.
    fn release(&self, events: Vec<CUevent>, streams: Vec<CUstream>) {
        let mut made = Made { events, streams };
        self.queue
            .release(0, move |context| made.destroy(context.device().library()));
    }
}

impl Made {
    /// Destroys everything. After an error it can be called again.
    fn destroy(&mut self, library: &Library) -> Result<(), DriverError> {
        while let Some(&event) = self.events.last() {
            // SAFETY: the event was made by a link, and no one uses it.
            unsafe { call!(library, cuEventDestroy_v2(event)) }?;
            self.events.pop();
        }
        while let Some(&stream) = self.streams.last() {
            // SAFETY: as above.
            unsafe { call!(library, cuStreamDestroy_v2(stream)) }?;
            self.streams.pop();
        }
        Ok(())
    }
}

/// Returns the number of slots for a ring, given the host's available memory. If memory is short, the ring gets
/// fewer slots: a restore must not fail because memory for the faster way is missing.
fn slots_within(available: Option<Bytes>, sizes: &Sizes) -> usize {
    // The other half is for kept memory and for other processes.
    let half = available.map_or(u64::MAX, |available| available.get() / 2);
    let fitting = half / sizes.piece_bytes as u64;
    usize::try_from(fitting).map_or(sizes.slots, |fitting| fitting.clamp(1, sizes.slots))
}

impl Drop for Link {
    fn drop(&mut self) {
        let mut streams = vec![self.direct, self.staged];
        streams.retain(|stream| !stream.is_null());
        let events = mem::take(&mut self.events);
        self.release(events, streams);
    }
}
