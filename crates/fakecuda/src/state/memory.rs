//! The table of memory: reserved device addresses, mappings, and pinned host memory.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use super::device::{Charge, GRANULARITY_BYTES};
use crate::os::{self, Access, HostRange, PAGE_BYTES};
use crate::sys::*;

/// All memory of all devices, and pinned host memory.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// Address ranges by their start: those that the program reserved and those of allocations. None overlap.
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    /// Mappings by address. Each lies within one reservation, and none overlap.
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Handles that have not been released, by name.
    pub(crate) handles: BTreeMap<CUmemGenericAllocationHandle, Handle>,
    /// Pinned host memory, by its start.
    pub(crate) host: BTreeMap<u64, HostMemory>,
}

#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) range: HostRange,
    /// Whether this is an allocation's range: the program cannot free its addresses or map there.
    pub(crate) is_allocation: bool,
}

#[derive(Debug)]
pub(crate) struct Mapping {
    /// The requested size. The host maps this, rounded up to its pages.
    pub(crate) bytes: u64,
    pub(crate) physical: Arc<Physical>,
    pub(crate) kind: Kind,
}

/// The origin of a mapping, which decides who may use it.
#[derive(Debug)]
pub(crate) enum Kind {
    /// Mapped from a handle by `cuMemMap`. `access` has each device's rights from `cuMemSetAccess`.
    Virtual {
        handle: CUmemGenericAllocationHandle,
        access: BTreeMap<usize, Access>,
    },
    /// Allocated by `cuMemAlloc` or `cuMemAllocAsync`.
    Allocation,
    /// Allocated by `cuMemAllocManaged`: every device and the host may use it.
    Managed,
    /// Opened by `cuIpcOpenMemHandle`, `opens` times.
    Opened { key: [u8; 64], opens: u64 },
}

/// Physical memory. It exists as long as a handle or a mapping refers to it, in any process.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: File,
    pub(crate) bytes: u64,
    pub(crate) device: usize,
    pub(crate) properties: CUmemAllocationProp,
    /// `None` if the memory counts as used in another process, or not at all.
    _charge: Option<Charge>,
}

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) physical: Arc<Physical>,
    /// How often the handle must be released.
    pub(crate) references: u64,
}

/// Pinned host memory, which copies do not have to stage.
#[derive(Debug)]
pub(crate) struct HostMemory {
    pub(crate) bytes: u64,
    /// `None` if the program owns the memory and only registered it.
    pub(crate) range: Option<HostRange>,
}

impl Physical {
    /// Creates physical memory of the device with this number.
    ///
    /// # Errors
    ///
    /// `OUT_OF_MEMORY` if the host has too little memory.
    pub(crate) fn new(
        number: usize,
        bytes: u64,
        charge: Option<Charge>,
        properties: CUmemAllocationProp,
    ) -> Result<Arc<Self>, CUresult> {
        let file = os::create_file(&file_name(number), bytes.next_multiple_of(PAGE_BYTES));
        Ok(Arc::new(Self {
            file: file.map_err(|_| CUresult::OUT_OF_MEMORY)?,
            bytes,
            device: usize::try_from(properties.location.id)
                .map_err(|_| CUresult::INVALID_DEVICE)?,
            properties,
            _charge: charge,
        }))
    }

    /// Returns memory that another process created.
    pub(crate) fn foreign(file: File, bytes: u64, properties: CUmemAllocationProp) -> Arc<Self> {
        Arc::new(Self {
            file,
            bytes,
            device: usize::try_from(properties.location.id).expect("checked by the caller"),
            properties,
            _charge: None,
        })
    }

    /// Returns a key that identifies this memory on the machine: the file's inode number.
    pub(crate) fn key(&self) -> Option<u64> {
        file_key(&self.file)
    }
}

/// Returns the inode number of a file, which all its duplicates share.
pub(crate) fn file_key(file: &File) -> Option<u64> {
    Some(file.metadata().ok()?.ino())
}

/// Returns the name of files that hold memory of the device with this number. An import reads the number back.
pub(crate) fn file_name(number: usize) -> String {
    format!("fakecuda-device-{number}")
}

/// Returns the default properties of memory on `device`.
pub(crate) fn plain_properties(device: CUdevice, handle_types: u32) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: handle_types,
        location: CUmemLocation {
            kind: CU_MEM_LOCATION_TYPE_DEVICE,
            id: device,
        },
        ..CUmemAllocationProp::default()
    }
}

impl Memory {
    /// Returns the reservation that contains an address.
    pub(crate) fn reservation_at(&self, address: u64) -> Option<&Reservation> {
        let (&start, reservation) = self.reservations.range(..=address).next_back()?;
        (address - start < reservation.range.bytes()).then_some(reservation)
    }

    /// Returns the mapping that contains an address, and its start.
    pub(crate) fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.bytes).then_some((start, mapping))
    }

    /// Returns the start and size of the pinned host memory that contains an address.
    pub(crate) fn host_at(&self, address: u64) -> Option<(u64, u64)> {
        let (&start, memory) = self.host.range(..=address).next_back()?;
        (address - start < memory.bytes).then_some((start, memory.bytes))
    }

    /// Returns the mappings that overlap the range, ordered by address.
    pub(crate) fn mappings_in(
        &self,
        address: u64,
        bytes: u64,
    ) -> impl Iterator<Item = (u64, &Mapping)> {
        let end = address.saturating_add(bytes);
        let below = self.mappings.range(..address).next_back();
        let below = below.filter(move |&(&start, mapping)| start + mapping.bytes > address);
        let within = self.mappings.range(address..end);
        below
            .into_iter()
            .chain(within)
            .map(|(&start, mapping)| (start, mapping))
    }

    /// Returns whether every byte of the range is mapped, and `fine` returns true for every mapping there.
    pub(crate) fn covers(&self, address: u64, bytes: u64, fine: impl Fn(&Mapping) -> bool) -> bool {
        let Some(end) = address.checked_add(bytes) else {
            return false;
        };
        let mut next = address;
        for (start, mapping) in self.mappings_in(address, bytes) {
            if start > next || !fine(mapping) {
                return false;
            }
            next = start + mapping.bytes;
        }
        next >= end
    }

    /// Returns the starts of the mappings in the range, in order. The range may have gaps.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if the range cuts a mapping.
    pub(crate) fn uncut_mappings(&self, address: u64, bytes: u64) -> Result<Vec<u64>, CUresult> {
        let end = address.checked_add(bytes).ok_or(CUresult::INVALID_VALUE)?;
        let whole = |(start, mapping): (u64, &Mapping)| {
            let is_cut = start < address || start + mapping.bytes > end;
            (!is_cut).then_some(start).ok_or(CUresult::INVALID_VALUE)
        };
        self.mappings_in(address, bytes).map(whole).collect()
    }

    /// Returns the starts of the mappings that fill the range exactly, in order.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if the range has gaps or cuts a mapping.
    pub(crate) fn whole_mappings(&self, address: u64, bytes: u64) -> Result<Vec<u64>, CUresult> {
        let end = address.checked_add(bytes).ok_or(CUresult::INVALID_VALUE)?;
        let mut next = address;
        let mut starts = Vec::new();
        while next < end {
            let mapping = self.mappings.get(&next).ok_or(CUresult::INVALID_VALUE)?;
            starts.push(next);
            next += mapping.bytes;
        }
        if next != end || starts.is_empty() {
            return Err(CUresult::INVALID_VALUE);
        }
        Ok(starts)
    }

    /// Maps all of `physical` at new addresses, readable and writable. Returns the start.
    ///
    /// # Errors
    ///
    /// `OUT_OF_MEMORY` if the host has too little memory.
    pub(crate) fn allocate(
        &mut self,
        physical: Arc<Physical>,
        kind: Kind,
    ) -> Result<u64, CUresult> {
        let host_bytes = physical.bytes.next_multiple_of(PAGE_BYTES);
        // Allocations begin 2 MiB apart at least, so an overrun ends in a fault.
        let range = HostRange::of_file(host_bytes, GRANULARITY_BYTES, &physical.file);
        let range = range.map_err(|_| CUresult::OUT_OF_MEMORY)?;
        let address = range.start();
        let reservation = Reservation {
            range,
            is_allocation: true,
        };
        self.reservations.insert(address, reservation);
        let mapping = Mapping {
            bytes: physical.bytes,
            physical,
            kind,
        };
        self.mappings.insert(address, mapping);
        Ok(address)
    }

    /// Unmaps memory that [`Memory::allocate`] returned: any later access faults.
    pub(crate) fn free(&mut self, address: u64) {
        self.mappings.remove(&address);
        self.reservations.remove(&address);
    }

    /// Frees every allocation on a device.
    pub(crate) fn free_allocations_of(&mut self, device: usize) {
        let is_gone = |mapping: &Mapping| {
            mapping.physical.device == device && !matches!(mapping.kind, Kind::Virtual { .. })
        };
        let mappings = self.mappings.iter();
        let gone: Vec<u64> = mappings
            .filter(|(_, mapping)| is_gone(mapping))
            .map(|(&address, _)| address)
            .collect();
        for address in gone {
            self.free(address);
        }
    }

    /// Returns the number of allocations.
    pub(crate) fn allocation_count(&self) -> usize {
        let reservations = self.reservations.values();
        reservations.filter(|range| range.is_allocation).count()
    }
}
