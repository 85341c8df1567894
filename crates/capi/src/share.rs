//! Memory that is shared between processes.
//!
//! Memory that the driver allocated has a name that any process can open (CUDA's IPC). Mapped memory, such as
//! expandable segments, has none: its handles are passed between processes as file descriptors. So a process that
//! shared such memory has a thread that sends the handles over a local socket. It sends them to processes of the
//! same user that present the token in the bytes. The system call by which an importer could fetch them itself,
//! `pidfd_getfd`, is refused in containers (pytorch#165685).
//!
//! ```text
//! lowtide_share    share.rs        finds the allocation or the handles that hold a block
//! ├─ Ticket        ticket.rs       the bytes
//! └─ server        server.rs       the thread
//! lowtide_attach   share.rs        counts what is attached
//! ├─ Ticket
//! └─ fetch         client.rs       asks that thread
//!    └─            wire.rs         the requests and replies
//! ```

mod client;
mod server;
mod ticket;
mod wire;

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, MutexGuard};

use lowtide_core::{AllocError, Bytes, DeviceAddress, DriverError};
use lowtide_cuda::{HeldRange, Library, Uuid};

use crate::boundary::{run, write_to_c};
use crate::control::copy_for_c;
use crate::devices::{self, Allocator};
use crate::error::{Error, Status};
use crate::pointers::{address_of, pointer_to};
use crate::{cuda, peers, regions, start};
use ticket::{Identity, Mapped, Shared, Ticket};

/// Writes bytes to `bytes` that another process passes to `lowtide_attach`. Writes to `offset` the distance from
/// the address that it gets there to the block at `memory`.
///
/// The bytes name the driver's allocation that holds the block or, in an expandable segment, the pages that hold
/// it. Blocks with the same allocation or pages have the same bytes. The caller owns the `length` bytes and frees
/// them with `lowtide_release_bytes`. Keep them secret: they give any process of the same user access to the
/// memory's contents. On failure nothing is written; the status is `LOWTIDE_STATUS_PAUSED` if the block's region
/// is paused.
///
/// The block must stay allocated while other processes use it. Once it is freed, its memory is reused, and bytes
/// whose pages were released to the driver are refused. When the process ends, its plain segments are freed for
/// all processes; pages of expandable segments stay for those that have attached them.
///
/// The first shared block of an expandable segment starts a thread that sends the memory's handles to other
/// processes. A forked child does not have the thread and cannot share.
///
/// # Safety
///
/// `bytes`, `length` and `offset` are null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_share(
    memory: *mut c_void,
    bytes: *mut *mut c_void,
    length: *mut usize,
    offset: *mut u64,
) -> Status {
    run(|| {
        if bytes.is_null() || length.is_null() || offset.is_null() {
            return Err(Error::null("bytes`, `length` and `offset"));
        }
        let (ticket, distance) = share(address_of(memory))?;
        let encoded = ticket.encode();
        let copy = copy_for_c(&encoded)?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("bytes", bytes, copy) }?;
        // SAFETY: as above.
        unsafe { write_to_c("length", length, encoded.len()) }?;
        // SAFETY: as above.
        unsafe { write_to_c("offset", offset, distance.get()) }
    })
}

/// Attaches memory that another process shared by `lowtide_share`, and writes its start in this process to
/// `memory`. It is for work on `device`, this process's number of the other process's device. The same bytes give
/// the same address again, and each call must be undone by `lowtide_detach`. On failure `memory` is not changed.
///
/// Uses as many bytes of addresses as the memory has, and no device memory. Work of other devices may access it
/// if `lowtide_enable_peer_access` allows that for `device`. If the processes number their devices differently
/// (`CUDA_VISIBLE_DEVICES`), the device that has the memory is found by its UUID, and `device` gets peer access
/// to it.
///
/// Returns `LOWTIDE_STATUS_INVALID_ARGUMENT`:
/// - if the bytes are not from `lowtide_share`, or this process made them itself;
/// - if the memory or its process is gone;
/// - if this process does not see the device.
///
/// A process that shared expandable segments must be on the same machine and have the same user. Both processes
/// must see the same directory of that user: `XDG_RUNTIME_DIR`, `/run/user/UID` or `/tmp`.
///
/// # Safety
///
/// `bytes` may be read for `length` bytes. `memory` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_attach(
    device: c_int,
    bytes: *const c_void,
    length: usize,
    memory: *mut *mut c_void,
) -> Status {
    run(|| {
        if bytes.is_null() || memory.is_null() {
            return Err(Error::null("bytes` and `memory"));
        }
        // SAFETY: 1. it is not null, and may be read for so many bytes, by the contract of this function.
        // 2. The slice is not used after this call.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.cast::<u8>(), length) };
        let ticket = Ticket::decode(bytes)?;
        // Starts the driver: after that, no forked child uses this process's identity as its own.
        let library = cuda::library()?;
        if ticket.exporter == Identity::of_this_process()?.name {
            let text = "these bytes are of this process, which has the memory already";
            return Err(Error::new(Status::InvalidArgument, text));
        }
        let owner = find_device(&library, ticket.device, device)?;
        let user = start::device(device)?;
        let allocator = start::device(owner)?;
        if owner != device {
            peers::enable(allocator, user)?;
        }
        let address = attach(allocator, &ticket, bytes)?;
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("memory", memory, pointer_to(address)) }
    })
}

/// Undoes one `lowtide_attach`. The last call for an address waits for the device's work and detaches the memory.
/// Do not call it while a stream of the device is being captured: the call would fail and invalidate the capture.
/// Work of other devices that uses the memory must have ended. While one thread waits, other threads may do
/// everything, even attach the same memory again, which then stays.
///
/// Returns `LOWTIDE_STATUS_NOT_ALLOCATED` for an address that `lowtide_attach` did not return. After another
/// failure the memory is still attached, and the same call may succeed later.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_detach(memory: *mut c_void) -> Status {
    run(|| detach(address_of(memory)))
}

fn share(address: DeviceAddress) -> Result<(Ticket, Bytes), Error> {
    let (ordinal, block) = devices::find_allocation(address)?;
    regions::refuse_paused(ordinal, &block)?;
    let identity = Identity::of_this_process()?;
    let allocator = devices::get(ordinal).expect("a device with an allocation is in use");
    let (device, mapped, named) = {
        let physical = allocator.physical();
        let mapped = physical.mapped_range(address, block.size);
        let driver = physical.driver();
        let named = match mapped {
            Some(_) if !driver.supports_export() => Some(Err(not_exportable())),
            Some(_) => None,
            None => Some(driver.ipc_handle(address).map_err(Error::from)),
        };
        (driver.device().clone(), mapped, named)
    };
    let (shared, start) = match (mapped, named.transpose()?) {
        (_, Some((handle, offset))) => (Shared::Allocation(handle), offset),
        (Some(range), None) => {
            server::start(identity)?;
            let mapped = Mapped {
                process: std::process::id(),
                token: identity.token,
                range,
            };
            (Shared::Mapped(mapped), address.offset_from(range.address))
        }
        (None, None) => unreachable!("what is not mapped is named, or that failed"),
    };
    let ticket = Ticket {
        exporter: identity.name,
        device: device.uuid()?,
        shared,
    };
    Ok((ticket, start))
}

fn not_exportable() -> Error {
    let text = "this machine's driver refuses memory that other processes can map, as expandable segments \
                must be to be shared";
    Error::new(Status::Driver, text)
}

/// The attached memory, by address.
type Attachments = BTreeMap<DeviceAddress, Attachment>;

struct Attachment {
    /// The allocator of the memory's device.
    allocator: &'static Allocator,
    /// The bytes that it was attached by. `None` if the memory can only be unmapped.
    bytes: Option<Box<[u8]>>,
    memory: Memory,
    /// The number of holders.
    count: u64,
    /// The number of holders so far, including former ones.
    holders: u64,
}

enum Memory {
    /// Another process's allocation.
    Opened,
    /// Another process's handles.
    Mapped(HeldRange),
}

/// Also locked while another process is asked, because the same bytes must not be mapped twice. That process may
/// wait in the same way, because its thread does not take this lock. Not locked while the device's work is
/// awaited, because that work may need what other threads have yet to queue.
static ATTACHED: Mutex<Attachments> = Mutex::new(Attachments::new());

fn attached() -> Result<MutexGuard<'static, Attachments>, Error> {
    let attached = ATTACHED.lock();
    attached.map_err(|_| Error::stopped("when memory was attached"))
}

fn attach(
    allocator: &'static Allocator,
    ticket: &Ticket,
    bytes: &[u8],
) -> Result<DeviceAddress, Error> {
    let mut attached = attached()?;
    let mut all = attached.iter_mut();
    if let Some((&address, known)) = all.find(|(_, known)| known.bytes.as_deref() == Some(bytes)) {
        known.count += 1;
        known.holders += 1;
        return Ok(address);
    }
    let (address, memory) = match &ticket.shared {
        Shared::Allocation(handle) => {
            let opened = allocator.physical().driver_mut().open_ipc(handle)?;
            (opened, Memory::Opened)
        }
        Shared::Mapped(mapped) => {
            let (address, held) = import(allocator, ticket.exporter, mapped)?;
            (address, Memory::Mapped(held))
        }
    };
    let attachment = Attachment {
        allocator,
        bytes: Some(bytes.into()),
        memory,
        count: 1,
        holders: 1,
    };
    attached.insert(address, attachment);
    Ok(address)
}

/// Returns the number of the device with this UUID; `likely` is checked first.
fn find_device(library: &Arc<Library>, uuid: Uuid, likely: c_int) -> Result<c_int, Error> {
    let others = (0..library.device_count()?).map(u32::cast_signed);
    let known = others.clone().filter(|&ordinal| ordinal == likely);
    for ordinal in known.chain(others) {
        if library.device(ordinal.cast_unsigned())?.uuid()? == uuid {
            return Ok(ordinal);
        }
    }
    let text = format_args!(
        "the memory is on GPU-{uuid}, which this process does not see (CUDA_VISIBLE_DEVICES)"
    );
    Err(Error::new(Status::InvalidArgument, text))
}

/// Maps another process's handles one after another, a batch at a time. On failure nothing stays mapped.
fn import(
    allocator: &Allocator,
    exporter: [u8; 16],
    mapped: &Mapped,
) -> Result<(DeviceAddress, HeldRange), Error> {
    let size = mapped.range.size;
    // Asked before addresses are reserved, because the size in the bytes may be false.
    let mut parts = client::fetch(exporter, mapped, Bytes::ZERO)?;
    let mut held = allocator.physical().driver_mut().begin_import(size)?;
    let mut offset = Bytes::ZERO;
    let mut import_all = || loop {
        let mut physical = allocator.physical();
        for (part, size) in parts.drain(..) {
            offset += size;
            physical.driver_mut().import_part(&mut held, &part, size)?;
        }
        drop(physical);
        if offset == size {
            return Ok(());
        }
        parts = client::fetch(exporter, mapped, offset)?;
    };
    let imported: Result<(), Error> = import_all();
    let finished = imported.and_then(|()| {
        allocator.physical().driver_mut().finish_import(&held)?;
        let address = held.address().expect("it was reserved above");
        Ok(address)
    });
    match finished {
        Ok(address) => Ok((address, held)),
        Err(error) => {
            allocator.physical().driver_mut().abandon(held);
            Err(error)
        }
    }
}

/// A holder's work is queued when it detaches, so the wait includes it, unless the holder attached and detached
/// during the wait.
fn detach(address: DeviceAddress) -> Result<(), Error> {
    let mut awaited_holders = None;
    loop {
        let mut attached = attached()?;
        let attachment = attached.get_mut(&address);
        let attachment = attachment.ok_or(AllocError::NotAllocated { address })?;
        if attachment.count > 1 {
            attachment.count -= 1;
            return Ok(());
        }
        if awaited_holders == Some(attachment.holders) {
            return end(&mut attached, address);
        }
        awaited_holders = Some(attachment.holders);
        let allocator = attachment.allocator;
        drop(attached);
        let device = allocator.physical().driver().device().clone();
        unless_driver_gone(device.synchronize())?;
    }
}

/// Detaches memory that no work uses any more.
fn end(attached: &mut Attachments, address: DeviceAddress) -> Result<(), Error> {
    let attachment = attached.get_mut(&address);
    let attachment = attachment.ok_or(AllocError::NotAllocated { address })?;
    let mut physical = attachment.allocator.physical();
    let driver = physical.driver_mut();
    let ended = match &mut attachment.memory {
        Memory::Opened => driver.close_ipc(address),
        Memory::Mapped(held) => driver.end_import(held),
    };
    drop(physical);
    let is_usable = match &attachment.memory {
        Memory::Opened => ended.is_err(),
        Memory::Mapped(held) => held.is_mapped(),
    };
    if !is_usable {
        attachment.bytes = None;
    }
    unless_driver_gone(ended)?;
    attached.remove(&address);
    Ok(())
}

/// Returns the error, unless it says that the driver has shut down and so has freed all memory.
fn unless_driver_gone(outcome: Result<(), DriverError>) -> Result<(), Error> {
    match outcome.map_err(AllocError::Driver) {
        Err(error) if !cuda::is_gone(&error) => Err(error.into()),
        _ => Ok(()),
    }
}
