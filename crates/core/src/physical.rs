//! Physical memory: the driver, the handles that it gave, and where each is mapped.
//!
//! Nothing here knows a block, a figure or an event: [`Heap`](crate::segment::Heap) counts what a call did.

use std::collections::BTreeMap;

use crate::domain::DomainId;
use crate::driver::{Driver, DriverError, Handle};
use crate::stats::SizeKind;
use crate::units::{Bytes, DeviceAddress, signed};

/// The pool and domain whose reserved bytes a handle is part of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Owner {
    pub(crate) domain: DomainId,
    pub(crate) kind: SizeKind,
}

/// Reserved addresses, into which handles of one size are mapped.
#[derive(Debug)]
struct Range {
    page_size: Bytes,
    /// The handle behind each page; `None` where the page is not mapped. Ends with a mapped page.
    handles: Vec<Option<Handle>>,
    /// What the driver mapped, but would neither make usable nor unmap. It is asked again before anything is mapped
    /// here, or the addresses go back.
    half_mapped: Vec<(DeviceAddress, Bytes)>,
}

/// A handle that is mapped nowhere, because the driver refused to take it back. It still counts as reserved.
#[derive(Debug)]
struct Spare {
    handle: Handle,
    size: Bytes,
    owner: Owner,
}

/// The memory of a device, as the driver gave it.
#[derive(Debug)]
pub(crate) struct Physical<D> {
    pub(crate) driver: D,
    /// By their first addresses.
    ranges: BTreeMap<DeviceAddress, Range>,
    /// Mapped again before a handle is created, and offered to the driver at each [`Physical::release_spares`].
    spares: Vec<Spare>,
}

impl<D: Driver> Physical<D> {
    pub(crate) fn new(driver: D) -> Physical<D> {
        Physical {
            driver,
            ranges: BTreeMap::new(),
            spares: Vec::new(),
        }
    }

    /// Returns the first of `size` reserved addresses, with no memory behind them. One driver call.
    ///
    /// # Errors
    ///
    /// What the driver said.
    pub(crate) fn reserve(
        &mut self,
        size: Bytes,
        page_size: Bytes,
    ) -> Result<DeviceAddress, DriverError> {
        let address = self.driver.reserve(size)?;
        let range = Range {
            page_size,
            handles: Vec::new(),
            half_mapped: Vec::new(),
        };
        let before = self.ranges.insert(address, range);
        debug_assert!(before.is_none(), "addresses are reserved once");
        Ok(address)
    }

    /// Gives a reserved range back, in which nothing is mapped.
    ///
    /// # Errors
    ///
    /// What the driver said; the range is then still reserved.
    pub(crate) fn unreserve(
        &mut self,
        start: DeviceAddress,
        size: Bytes,
    ) -> Result<(), DriverError> {
        self.unmap_half_mapped(start)?;
        debug_assert!(
            self.ranges[&start].handles.is_empty(),
            "nothing is mapped in addresses that go back"
        );
        self.driver.unreserve(start, size)?;
        let range = self.ranges.remove(&start);
        debug_assert!(range.is_some_and(|range| range.half_mapped.is_empty()));
        Ok(())
    }

    /// Maps handles behind `size` bytes at `address` in the range that begins at `start`, and returns how many bytes
    /// were mapped: `size` rounded up to whole pages. `count` is told of spare handles that are none any more, or
    /// become some. Linear in the pages.
    ///
    /// # Errors
    ///
    /// What the driver said; nothing is then mapped that was not before.
    pub(crate) fn map(
        &mut self,
        start: DeviceAddress,
        address: DeviceAddress,
        size: Bytes,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<Bytes, DriverError> {
        self.unmap_half_mapped(start)?;
        let page_size = self.range(start).page_size;
        debug_assert!((address.offset_from(start) % page_size).is_zero());
        let mapped = size.round_up(page_size);
        let first = pages_in(address.offset_from(start), page_size);
        let handles = self.create_pages(pages_in(mapped, page_size), page_size, owner, count)?;
        if let Err(error) = self.map_pages(start, address, page_size, &handles) {
            self.release(handles, page_size, owner, count);
            return Err(error);
        }
        let slots = &mut self.range(start).handles;
        slots.resize(slots.len().max(first + handles.len()), None);
        for (slot, handle) in slots[first..].iter_mut().zip(handles) {
            debug_assert!(slot.is_none(), "a page is mapped once");
            *slot = Some(handle);
        }
        debug_assert!(self.has_memory(start, address.offset_from(start), size));
        Ok(mapped)
    }

    /// Unmaps `size` bytes at `address`, whole pages that are all mapped, and gives their handles back. The caller has
    /// waited for the work that uses them. `count` is told of handles that the driver refuses. Linear in the pages.
    ///
    /// # Errors
    ///
    /// What the driver said; everything is then still mapped. A handle that the driver refuses is kept as a spare one,
    /// which is no error here.
    pub(crate) fn unmap(
        &mut self,
        start: DeviceAddress,
        address: DeviceAddress,
        size: Bytes,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<(), DriverError> {
        self.driver.unmap(address, size)?;
        let range = self.range(start);
        let page_size = range.page_size;
        debug_assert!((size % page_size).is_zero(), "whole pages are unmapped");
        debug_assert!((address.offset_from(start) % page_size).is_zero());
        let first = pages_in(address.offset_from(start), page_size);
        let pages = first..first + pages_in(size, page_size);
        let slots = &mut range.handles;
        let handles: Vec<Handle> = { slots[pages].iter_mut() }
            .filter_map(Option::take)
            .collect();
        let last = slots.iter().rposition(Option::is_some);
        slots.truncate(last.map_or(0, |last| last + 1));
        debug_assert_eq!(
            handles.len(),
            pages_in(size, page_size),
            "only mapped pages are unmapped"
        );
        self.release(handles, page_size, owner, count);
        Ok(())
    }

    /// Has the driver unmap what it refused to in a range, in which nothing can be mapped before that.
    ///
    /// # Errors
    ///
    /// What the driver said.
    pub(crate) fn unmap_half_mapped(&mut self, start: DeviceAddress) -> Result<(), DriverError> {
        while let Some(&(address, size)) = self.range(start).half_mapped.last() {
            self.driver.unmap(address, size)?;
            self.range(start).half_mapped.pop();
        }
        Ok(())
    }

    /// Gives handles that are mapped nowhere back to the driver, or keeps them as spare ones.
    pub(crate) fn release(
        &mut self,
        handles: Vec<Handle>,
        size: Bytes,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) {
        for handle in handles {
            if self.driver.release(handle).is_err() {
                debug_assert!({ self.spares.iter() }.all(|spare| spare.handle != handle));
                self.spares.push(Spare {
                    handle,
                    size,
                    owner,
                });
                count(owner, signed(size));
            }
        }
    }

    /// Offers the driver once more what it refused to take back.
    ///
    /// # Errors
    ///
    /// What the driver said; what it took before that is gone.
    pub(crate) fn release_spares(
        &mut self,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<(), DriverError> {
        while let Some(spare) = self.spares.last() {
            self.driver.release(spare.handle)?;
            count(spare.owner, -signed(spare.size));
            self.spares.pop();
        }
        Ok(())
    }

    /// Creates handles for `count` pages: all or none.
    fn create_pages(
        &mut self,
        pages: usize,
        page_size: Bytes,
        owner: Owner,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<Vec<Handle>, DriverError> {
        let mut handles = Vec::with_capacity(pages);
        while handles.len() < pages {
            match self.create_page(page_size, count) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    self.release(handles, page_size, owner, count);
                    return Err(error);
                }
            }
        }
        Ok(handles)
    }

    fn create_page(
        &mut self,
        page_size: Bytes,
        count: &mut impl FnMut(Owner, i64),
    ) -> Result<Handle, DriverError> {
        let usable = { self.spares.iter() }.position(|spare| spare.size == page_size);
        let Some(index) = usable else {
            return self.driver.create(page_size);
        };
        let spare = self.spares.swap_remove(index);
        count(spare.owner, -signed(spare.size));
        Ok(spare.handle)
    }

    /// Maps handles one behind the other and makes them accessible: all or none.
    fn map_pages(
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
        self.ranges
            .get_mut(&start)
            .expect("segments lie in ranges that are reserved")
    }
}

impl<D> Physical<D> {
    /// Returns whether `size` bytes at an offset of a reserved range have memory behind them.
    pub(crate) fn has_memory(&self, start: DeviceAddress, offset: Bytes, size: Bytes) -> bool {
        let Some(Range {
            page_size, handles, ..
        }) = self.ranges.get(&start)
        else {
            return false;
        };
        let first = pages_in(offset, *page_size);
        let end = pages_in((offset + size).round_up(*page_size), *page_size);
        let pages = handles.get(first..end);
        pages.is_some_and(|pages| pages.iter().all(Option::is_some))
    }

    /// Returns the bytes of the handles that are mapped in a reserved range. Linear in its pages.
    pub(crate) fn mapped_bytes(&self, start: DeviceAddress) -> Bytes {
        let mapped = |range: &Range| {
            let pages = range.handles.iter().flatten().count();
            Bytes(pages as u64 * range.page_size.get())
        };
        self.ranges.get(&start).map_or(Bytes::ZERO, mapped)
    }

    /// Returns whose reserved bytes spare handles are.
    pub(crate) fn spare_owners(&self) -> impl Iterator<Item = Owner> {
        self.spares.iter().map(|spare| spare.owner)
    }

    /// Returns the bytes of the handles that the driver refused to take back.
    pub(crate) fn spare_bytes(&self) -> Bytes {
        self.spares.iter().map(|spare| spare.size).sum()
    }
}

fn pages_in(size: Bytes, page_size: Bytes) -> usize {
    usize::try_from(size.get() / page_size.get()).expect("the number of pages fits a usize")
}
