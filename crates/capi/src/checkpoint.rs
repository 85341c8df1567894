//! Restores a memory pool to an earlier state, for PyTorch's CUDA graph trees.

use std::ffi::{c_int, c_void};
use std::slice;

use lowtide_core::{Allocation, DeviceAddress};

use crate::boundary::{run, write_to_c};
use crate::error::{Error, Status};
use crate::pointers::{Mempool, address_of, host_size, pointer_to};
use crate::pools::{with_pool, with_pools};

/// The state of a memory pool at one moment. It holds no device memory.
#[derive(Debug)]
pub struct Checkpoint {
    device: c_int,
    checkpoint: lowtide_core::Checkpoint,
}

/// Writes to `is_equal` whether the program's blocks in a memory pool are exactly the `count` blocks that start
/// at the addresses in `expected`.
///
/// # Safety
///
/// `expected` may be read for `count` pointers, or `count` is 0; `is_equal` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_check_live(
    device: c_int,
    pool: Mempool,
    expected: *const *mut c_void,
    count: usize,
    is_equal: *mut bool,
) -> Status {
    run(|| {
        let mut expected: Vec<DeviceAddress> = if count == 0 {
            Vec::new()
        } else if expected.is_null() {
            return Err(Error::null("expected"));
        } else {
            // SAFETY: it is not null, and may be read for so many, by the contract of this function.
            let expected = unsafe { slice::from_raw_parts(expected, count) };
            expected.iter().map(|&memory| address_of(memory)).collect()
        };
        expected.sort_unstable();
        expected.dedup();
        let held = with_pool(device, pool, |pools, pool| pools.held_blocks(pool))?;
        let answer = held.iter().map(|block| block.address).eq(expected);
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("is_equal", is_equal, answer) }
    })
}

/// Writes the current state of a memory pool to `checkpoint`, for `lowtide_restore_pool`.
///
/// The caller owns the checkpoint and frees it with `lowtide_release_checkpoint`.
///
/// # Safety
///
/// `checkpoint` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_checkpoint_pool(
    device: c_int,
    pool: Mempool,
    checkpoint: *mut *mut Checkpoint,
) -> Status {
    run(|| {
        if checkpoint.is_null() {
            return Err(Error::null("checkpoint"));
        }
        let taken = with_pool(device, pool, |pools, pool| pools.checkpoint(pool))?;
        let taken = Checkpoint {
            device,
            checkpoint: taken,
        };
        // SAFETY: it may be written to, by the contract of this function.
        unsafe { write_to_c("checkpoint", checkpoint, Box::into_raw(Box::new(taken))) }
    })
}

/// Is called for a block of `size` bytes that belongs to `stream`. Called with the `context` that was registered
/// with it, by the thread that made the call, without any lock. It must not throw or unwind.
pub type BlockVisitor = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        memory: *mut c_void,
        size: usize,
        stream: *mut c_void,
    ),
>;

/// Frees every block that the program holds in the checkpoint's memory pool. Then allocates the blocks of the
/// checkpoint, at the same addresses and with the same sizes. PyTorch calls this `setCheckpointPoolState`.
///
/// Waits for other streams that use the blocks. After that, `freed` is called for each block that was freed, and
/// then `allocated` for each block that was allocated; either may be null.
///
/// Returns `LOWTIDE_STATUS_POOL`:
/// - if the pool has ended;
/// - if memory of the checkpoint was released to the driver since (the strategy `direct` releases a block as soon
///   as it is freed);
/// - if other streams use the blocks during a graph capture.
///
/// After any failure the program holds the same blocks as before, and neither function was called.
///
/// # Safety
///
/// `checkpoint` is null or from `lowtide_checkpoint_pool` and not released yet. Both functions may be called with
/// `context` until this returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_restore_pool(
    device: c_int,
    checkpoint: *const Checkpoint,
    freed: BlockVisitor,
    allocated: BlockVisitor,
    context: *mut c_void,
) -> Status {
    run(|| {
        // SAFETY: it is null or points to a checkpoint, by the contract of this function.
        let checkpoint = unsafe { checkpoint.as_ref() };
        let checkpoint = checkpoint.ok_or_else(|| Error::null("checkpoint"))?;
        if checkpoint.device != device {
            let text = format_args!("the checkpoint is of device {}", checkpoint.device);
            return Err(Error::new(Status::InvalidArgument, text));
        }
        let restored = with_pools(device, |pools| pools.restore(&checkpoint.checkpoint))?;
        let lists = [(freed, &restored.freed), (allocated, &restored.allocated)];
        for (visit, blocks) in lists {
            for block in blocks {
                // SAFETY: it may be called with the context, by the contract of this function.
                unsafe { show(visit, context, block) };
            }
        }
        Ok(())
    })
}

/// Frees a checkpoint from `lowtide_checkpoint_pool`. Null is ignored. The pool does not change.
///
/// # Safety
///
/// `checkpoint` is null, or from `lowtide_checkpoint_pool` and not released yet.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_release_checkpoint(checkpoint: *mut Checkpoint) {
    if !checkpoint.is_null() {
        // SAFETY: it came from a box in `lowtide_checkpoint_pool`, and is used no more, by the contract of
        // this function.
        drop(unsafe { Box::from_raw(checkpoint) });
    }
}

/// # Safety
///
/// `visit` may be called with the context.
unsafe fn show(visit: BlockVisitor, context: *mut c_void, block: &Allocation) {
    let Some(visit) = visit else {
        return;
    };
    let stream = pointer_to(DeviceAddress(block.stream.0));
    // SAFETY: by the contract of this function.
    unsafe {
        visit(
            context,
            pointer_to(block.address),
            host_size(block.size),
            stream,
        )
    };
}
