//! The physical memory of a device: the driver, the handles that it created, and each address at which one is mapped.
//!
//! All lanes of a device share this memory, and reach it through [`Memory`]. Its lock is the last in the lock order. A
//! lane holds the lock during each step of a miss or a release, which may be many driver calls: the other lanes' misses
//! wait. This module knows no block, statistic or event: [`Heap`](crate::segment::Heap) counts the effects.

mod views;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::{Deref, DerefMut};

use crate::domain::DomainId;
use crate::driver::{Driver, DriverError, Handle};
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress, signed};

pub use views::{MappedRange, View};

/// How a lane reaches the physical memory of its device: it owns it, or it locks it.
pub trait Memory {
    /// The driver of the device.
    type Driver: Driver;

    /// Returns the physical memory.
    fn physical(&self) -> impl Deref<Target = Physical<Self::Driver>>;

    /// Returns the same as [`Memory::physical`], mutable.
    fn physical_mut(&mut self) -> impl DerefMut<Target = Physical<Self::Driver>>;
}

/// The record of which lane holds which addresses, on a device with several lanes.
pub trait Owners: Debug + Send {
    /// Records that a lane holds `size` bytes at an address, before any of them is allocated.
    fn add(&self, lane: u8, address: DeviceAddress, size: Bytes);

    /// Removes bytes that a lane no longer holds, before another lane can hold them.
    fn remove(&self, address: DeviceAddress, size: Bytes);
}

/// The lane, pool and domain whose reserved bytes a handle is part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub(crate) lane: u8,
    pub(crate) domain: DomainId,
    pub(crate) kind: SizeKind,
}

/// A handle that exists.
#[derive(Debug)]
struct Held {
    size: Bytes,
    /// The number of addresses at which it is mapped.
    views: u32,
}

/// Reserved addresses, into which a lane maps handles of one size.
#[derive(Debug)]
struct Range {
    page_size: Bytes,
    /// The bytes of the handles that are mapped here. They are counted, because a replay's ranges may overlap:
    /// recordings do not show where a range ends.
    mapped: Bytes,
    /// Bytes that the driver mapped, but could neither make accessible nor unmap. They are unmapped before anything
    /// else is mapped here, and before the addresses are released.
    half_mapped: Vec<(DeviceAddress, Bytes)>,
}

/// A lane's handle that is mapped nowhere, because the driver refused to release it. It still counts as reserved.
#[derive(Clone, Copy, Debug)]
struct Spare {
    handle: Handle,
    owner: Owner,
}

/// The physical memory of a device.
#[derive(Debug)]
pub struct Physical<D> {
    driver: D,
    handles: BTreeMap<Handle, Held>,
    views: views::Views,
    /// By their first addresses.
    ranges: BTreeMap<DeviceAddress, Range>,
    /// Reused before a handle is created. [`Physical::release_spares`] tries again to release them.
    spares: Vec<Spare>,
    owners: Option<Box<dyn Owners>>,
}

impl<D: Driver> Memory for Physical<D> {
    type Driver = D;

    fn physical(&self) -> impl Deref<Target = Physical<D>> {
        self
    }

    fn physical_mut(&mut self) -> impl DerefMut<Target = Physical<D>> {
        self
    }
}

/// The driver, and single handles.
impl<D: Driver> Physical<D> {
    /// Returns the memory of a device without handles. `owners` is `None` for a device with one lane.
    pub fn new(driver: D, owners: Option<Box<dyn Owners>>) -> Physical<D> {
        Physical {
            driver,
            handles: BTreeMap::new(),
            views: views::Views::default(),
            ranges: BTreeMap::new(),
            spares: Vec::new(),
            owners,
        }
    }

    /// Returns new physical memory that is mapped nowhere. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::create`].
    pub fn create(&mut self, size: Bytes) -> Result<Handle, DriverError> {
        let handle = self.driver.create(size)?;
        let before = self.handles.insert(handle, Held { size, views: 0 });
        debug_assert!(before.is_none(), "a handle is created once");
        Ok(handle)
    }

    /// Maps a handle at an address of a reserved range. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::map`].
    ///
    /// # Panics
    ///
    /// If the handle does not exist.
    pub fn map(&mut self, address: DeviceAddress, handle: Handle) -> Result<(), DriverError> {
        let held = { self.handles.get_mut(&handle) }.expect("the handle exists");
        self.driver.map(address, held.size, handle)?;
        held.views += 1;
        self.views.insert(address, held.size, handle, false);
        Ok(())
    }

    /// Makes mapped handles readable and writable by the device. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::set_access`].
    pub fn set_access(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        debug_assert!(
            self.views.covers(address, size),
            "what is mapped can be accessed"
        );
        self.driver.set_access(address, size)?;
        self.views.allow_access(address, size);
        Ok(())
    }

    /// Unmaps a range of whole handles, which still exist. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::unmap`].
    pub fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.unmap_views(address, size)?;
        Ok(())
    }

    /// Releases a handle that is mapped nowhere. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::release`]; the handle then still exists.
    pub fn release(&mut self, handle: Handle) -> Result<(), DriverError> {
        debug_assert!(
            self.handles[&handle].views == 0,
            "no address shows the handle"
        );
        self.driver.release(handle)?;
        self.handles.remove(&handle);
        Ok(())
    }

    /// Returns the driver, for the calls that concern no handle.
    pub fn driver_mut(&mut self) -> &mut D {
        &mut self.driver
    }

    fn unmap_views(
        &mut self,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<Vec<Handle>, DriverError> {
        self.driver.unmap(address, size)?;
        let handles = self.views.remove(address, size);
        for handle in &handles {
            let held = { self.handles.get_mut(handle) }.expect("a mapped handle exists");
            held.views -= 1;
        }
        Ok(handles)
    }
}

/// Lookups, and the record of owners.
impl<D> Physical<D> {
    /// Returns the driver.
    pub fn driver(&self) -> &D {
        &self.driver
    }

    /// Returns the handle that is mapped from an address on, if any.
    pub fn view(&self, address: DeviceAddress) -> Option<&View> {
        self.views.at(address)
    }

    /// Returns every view, with its address, sorted by address.
    pub fn views(&self) -> impl Iterator<Item = (DeviceAddress, &View)> {
        self.views.iter()
    }

    /// Returns the range of handles that contains a block, or `None` if part of the block is not mapped. Linear in the
    /// handles of the range.
    pub fn mapped_range(&self, address: DeviceAddress, size: Bytes) -> Option<MappedRange> {
        self.views.around(address, size)
    }

    /// Returns the handles of a range from `offset` on, with their sizes. Returns `None` if the range is not mapped as
    /// it was, or if `offset` is at its end or beyond.
    pub fn handles(
        &self,
        range: &MappedRange,
        offset: Bytes,
    ) -> Option<impl Iterator<Item = (Handle, Bytes)>> {
        self.views.handles(range, offset)
    }

    /// Returns the bytes of all handles that exist. A handle counts once, at however many addresses it is mapped.
    pub fn created_bytes(&self) -> Bytes {
        self.handles.values().map(|held| held.size).sum()
    }

    /// Returns whether each handle's count of views is right. O(n log n) for n views.
    pub(crate) fn counts_views(&self) -> bool {
        let mut counts: BTreeMap<Handle, u32> = BTreeMap::new();
        for (_, view) in self.views.iter() {
            *counts.entry(view.handle).or_insert(0) += 1;
        }
        let counted =
            |(handle, held): (&Handle, &Held)| counts.remove(handle).unwrap_or(0) == held.views;
        self.handles.iter().all(counted) && counts.is_empty()
    }

    /// Returns whether a range is mapped. Linear in its handles.
    pub(crate) fn has_memory(&self, address: DeviceAddress, size: Bytes) -> bool {
        self.views.covers(address, size)
    }

    /// Returns the bytes of the handles that are mapped in the reserved range that begins at an address.
    pub(crate) fn mapped_bytes(&self, start: DeviceAddress) -> Bytes {
        let range = self.ranges.get(&start);
        range.map_or(Bytes::ZERO, |range| range.mapped)
    }

    /// Returns the domain of each spare handle of a lane.
    pub(crate) fn spare_domains(&self, lane: u8) -> impl Iterator<Item = DomainId> {
        self.spares_of(lane).map(|spare| spare.owner.domain)
    }

    /// Returns the bytes of a lane's handles that the driver refused to release.
    pub(crate) fn spare_bytes(&self, lane: u8) -> Bytes {
        self.spares_of(lane)
            .map(|spare| self.size_of(spare.handle))
            .sum()
    }

    fn size_of(&self, handle: Handle) -> Bytes {
        self.handles[&handle].size
    }

    fn spares_of(&self, lane: u8) -> impl Iterator<Item = &Spare> {
        let spares = self.spares.iter();
        spares.filter(move |spare| spare.owner.lane == lane)
    }

    /// Records that a lane holds memory from the driver or from another source.
    pub(crate) fn add_owner(&self, lane: u8, address: DeviceAddress, size: Bytes) {
        if let Some(owners) = &self.owners {
            owners.add(lane, address, size);
        }
    }

    /// Removes the record of memory that a lane releases.
    pub(crate) fn remove_owner(&self, address: DeviceAddress, size: Bytes) {
        if let Some(owners) = &self.owners {
            owners.remove(address, size);
        }
    }
}

/// A lane's segments.
impl<D: Driver> Physical<D> {
    /// Returns new memory for a lane. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::allocate`].
    pub(crate) fn allocate(&mut self, lane: u8, size: Bytes) -> Result<DeviceAddress, DriverError> {
        let address = self.driver.allocate(size)?;
        self.add_owner(lane, address, size);
        Ok(address)
    }

    /// Frees what [`Physical::allocate`] returned. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::free`].
    pub(crate) fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<(), DriverError> {
        self.driver.free(address, size)?;
        self.remove_owner(address, size);
        Ok(())
    }

    /// Returns the first of `size` reserved addresses, with no memory behind them. One driver call.
    ///
    /// # Errors
    ///
    /// As [`Driver::reserve`].
    pub(crate) fn reserve(
        &mut self,
        size: Bytes,
        page_size: Bytes,
    ) -> Result<DeviceAddress, DriverError> {
        let address = self.driver.reserve(size)?;
        let range = Range {
            page_size,
            mapped: Bytes::ZERO,
            half_mapped: Vec::new(),
        };
        let before = self.ranges.insert(address, range);
        debug_assert!(before.is_none(), "addresses are reserved once");
        Ok(address)
    }

    /// Releases a reserved range. Nothing may be mapped in it.
    ///
    /// # Errors
    ///
    /// The driver's error; the range is then still reserved.
    pub(crate) fn unreserve(
        &mut self,
        start: DeviceAddress,
        size: Bytes,
    ) -> Result<(), DriverError> {
        self.unmap_half_mapped(start)?;
        debug_assert!(
            self.range(start).mapped.is_zero(),
            "nothing is mapped there"
        );
        self.driver.unreserve(start, size)?;
        let range = self.ranges.remove(&start);
        debug_assert!(range.is_some_and(|range| range.half_mapped.is_empty()));
        Ok(())
    }

    /// Maps pages behind `size` bytes at `address`, in the range that begins at `start`. Returns the mapped bytes:
    /// `size` rounded up to whole pages. `count` receives each change in spare bytes: negative when a spare handle is
    /// mapped, positive when a handle becomes spare. Linear in the pages.
    ///
    /// # Errors
    ///
    /// The driver's error; nothing more is then mapped than before.
    pub(crate) fn map_pages(
        &mut self,
        start: DeviceAddress,
        address: DeviceAddress,
        size: Bytes,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<Bytes, DriverError> {
        // Nothing is created for addresses at which nothing can be mapped.
        self.unmap_half_mapped(start)?;
        let page_size = self.range(start).page_size;
        let mapped = size.round_up(page_size);
        let handles = self.create_pages(pages_in(mapped, page_size), page_size, owner, count)?;
        if let Err(error) = self.map_views(start, address, owner.lane, &handles) {
            self.release_pages(handles, owner, count);
            return Err(error);
        }
        Ok(mapped)
    }

    /// Maps handles of one page each at consecutive addresses, in the range that begins at `start`. They may also be
    /// mapped elsewhere. Linear in the handles.
    ///
    /// # Errors
    ///
    /// The driver's error; nothing more is then mapped than before.
    pub(crate) fn map_views(
        &mut self,
        start: DeviceAddress,
        address: DeviceAddress,
        lane: u8,
        handles: &[Handle],
    ) -> Result<(), DriverError> {
        self.unmap_half_mapped(start)?;
        let page_size = self.range(start).page_size;
        debug_assert!((address.offset_from(start) % page_size).is_zero());
        debug_assert!(
            { handles.iter() }.all(|&handle| self.size_of(handle) == page_size),
            "a handle is as large as its page"
        );
        self.map_handles(start, address, page_size, handles)?;
        let mut end = address;
        for &handle in handles {
            { self.handles.get_mut(&handle) }
                .expect("it was created")
                .views += 1;
            self.views.insert(end, page_size, handle, true);
            self.add_owner(lane, end, page_size);
            end = end + page_size;
        }
        let mapped = end.offset_from(address);
        self.range(start).mapped += mapped;
        debug_assert!(self.has_memory(address, mapped));
        Ok(())
    }

    /// Unmaps `size` bytes at `address` and releases their handles. The bytes must be whole pages, all mapped, and the
    /// work that uses them must be done. `count` receives the bytes of handles that become spare. Linear in the pages.
    ///
    /// # Errors
    ///
    /// The driver's error; everything is then still mapped. A handle that the driver refuses to release becomes spare,
    /// which is not an error.
    pub(crate) fn unmap_pages(
        &mut self,
        start: DeviceAddress,
        address: DeviceAddress,
        size: Bytes,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<(), DriverError> {
        let handles = self.unmap_in_range(start, address, size)?;
        self.release_pages(handles, owner, count);
        Ok(())
    }

    /// Unmaps `size` bytes at `address` and returns their handles, which still exist. The bytes must be whole pages,
    /// all mapped, and the work that uses the addresses must be done. Linear in the pages.
    ///
    /// # Errors
    ///
    /// The driver's error; everything is then still mapped.
    pub(crate) fn unmap_in_range(
        &mut self,
        start: DeviceAddress,
        address: DeviceAddress,
        size: Bytes,
    ) -> Result<Vec<Handle>, DriverError> {
        let page_size = self.range(start).page_size;
        debug_assert!((size % page_size).is_zero(), "whole pages are unmapped");
        debug_assert!((address.offset_from(start) % page_size).is_zero());
        debug_assert!(
            self.has_memory(address, size),
            "only mapped pages are unmapped"
        );
        let handles = self.unmap_views(address, size)?;
        debug_assert_eq!(handles.len(), pages_in(size, page_size));
        let range = self.range(start);
        debug_assert!(range.mapped >= size);
        range.mapped -= size;
        // The range stays reserved for this lane, so that no other lane records memory there.
        self.remove_owner(address, size);
        Ok(handles)
    }

    /// Tries again to release the handles of a lane that the driver refused to release.
    ///
    /// # Errors
    ///
    /// The driver's error; handles released before that stay released.
    pub(crate) fn release_spares(
        &mut self,
        lane: u8,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<(), DriverError> {
        let is_own = |spare: &Spare| spare.owner.lane == lane;
        while let Some(index) = self.spares.iter().rposition(is_own) {
            let Spare { handle, owner } = self.spares[index];
            let size = self.size_of(handle);
            self.release(handle)?;
            self.spares.swap_remove(index);
            count(owner, -signed(size));
        }
        Ok(())
    }

    /// Releases a lane's handles that are mapped nowhere. Those that the driver refuses become spare; `count` receives
    /// their bytes.
    pub(crate) fn release_pages(
        &mut self,
        handles: Vec<Handle>,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) {
        for handle in handles {
            if self.release(handle).is_err() {
                debug_assert!({ self.spares.iter() }.all(|spare| spare.handle != handle));
                self.spares.push(Spare { handle, owner });
                count(owner, signed(self.size_of(handle)));
            }
        }
    }

    /// Unmaps the bytes of a range that the driver refused to unmap. Nothing can be mapped in it before that.
    ///
    /// # Errors
    ///
    /// As [`Driver::unmap`].
    pub(crate) fn unmap_half_mapped(&mut self, start: DeviceAddress) -> Result<(), DriverError> {
        while let Some(&(address, size)) = self.range(start).half_mapped.last() {
            self.driver.unmap(address, size)?;
            self.range(start).half_mapped.pop();
        }
        Ok(())
    }

    /// Returns one handle for each of `pages` pages, or none. `count` is that of [`Physical::map_pages`].
    ///
    /// # Errors
    ///
    /// As [`Driver::create`].
    pub(crate) fn create_pages(
        &mut self,
        pages: usize,
        page_size: Bytes,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<Vec<Handle>, DriverError> {
        let mut handles = Vec::with_capacity(pages);
        while handles.len() < pages {
            match self.create_page(page_size, owner.lane, count) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    self.release_pages(handles, owner, count);
                    return Err(error);
                }
            }
        }
        Ok(handles)
    }

    fn create_page(
        &mut self,
        page_size: Bytes,
        lane: u8,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<Handle, DriverError> {
        let fits =
            |spare: &Spare| self.size_of(spare.handle) == page_size && spare.owner.lane == lane;
        let Some(index) = self.spares.iter().position(fits) else {
            return self.create(page_size);
        };
        let spare = self.spares.swap_remove(index);
        count(spare.owner, -signed(page_size));
        Ok(spare.handle)
    }

    /// Maps handles at consecutive addresses and makes them accessible: all or none.
    fn map_handles(
        &mut self,
        start: DeviceAddress,
        address: DeviceAddress,
        page_size: Bytes,
        handles: &[Handle],
    ) -> Result<(), DriverError> {
        let mut end = address;
        let mut result = Ok(());
        for &handle in handles {
            result = self.driver.map(end, page_size, handle);
            if result.is_err() {
                break;
            }
            end = end + page_size;
        }
        let mapped = end.offset_from(address);
        let result = result.and_then(|()| self.driver.set_access(address, mapped));
        if result.is_err() && !mapped.is_zero() && self.driver.unmap(address, mapped).is_err() {
            // The first error says more.
            self.range(start).half_mapped.push((address, mapped));
        }
        result
    }

    /// Returns the range that begins at an address.
    ///
    /// # Panics
    ///
    /// If none does.
    fn range(&mut self, start: DeviceAddress) -> &mut Range {
        { self.ranges.get_mut(&start) }.expect("segments lie in ranges that are reserved")
    }
}

fn pages_in(size: Bytes, page_size: Bytes) -> usize {
    usize::try_from(size.get() / page_size.get()).expect("the number of pages fits a usize")
}
