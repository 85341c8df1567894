//! The properties of an address: `cuPointerGetAttribute`.

use std::ffi::{c_int, c_uint, c_void};

use crate::calls::{Outcome, driver_calls};
use crate::pointers::Out;
use crate::state::device::{host_size, ordinal};
use crate::state::memory::{Kind, Mapping};
use crate::state::{State, lock};
use crate::sys::*;

driver_calls! {
    fn cuPointerGetAttribute(data: *mut c_void, attribute: c_uint, address: CUdeviceptr) {
        let state = lock()?;
        let (start, bytes, mapping) = match state.memory.mapping_at(address) {
            Some((start, mapping)) => (start, mapping.bytes, Some(mapping)),
            None => {
                let found = state.memory.host_at(address);
                let (start, bytes) = found.ok_or(CUresult::INVALID_VALUE)?;
                (start, bytes, None)
            }
        };
        let answer = Answer(data);
        match (attribute, mapping) {
            (CU_POINTER_ATTRIBUTE_DEVICE_POINTER, _) => answer.set::<CUdeviceptr>(address),
            (CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, _) => answer.set::<CUdeviceptr>(start),
            (CU_POINTER_ATTRIBUTE_RANGE_SIZE, _) => answer.set::<usize>(host_size(bytes)),
            (CU_POINTER_ATTRIBUTE_MAPPED, _) => answer.set::<bool>(true),
            (_, Some(mapping)) => answer.of_device(&state, attribute, address, start, mapping),
            (CU_POINTER_ATTRIBUTE_MEMORY_TYPE, None) => answer.set::<c_uint>(CU_MEMORYTYPE_HOST),
            (CU_POINTER_ATTRIBUTE_HOST_POINTER, None) => answer.set::<u64>(address),
            (CU_POINTER_ATTRIBUTE_IS_MANAGED, None) => answer.set::<bool>(false),
            _ => Err(CUresult::INVALID_VALUE),
        }
    }
}

/// The destination of the attribute's value; its type depends on the attribute.
struct Answer(*mut c_void);

impl Answer {
    fn set<T>(&self, value: T) -> Outcome {
        Out::new(self.0.cast::<T>()).required()?.set(value);
        Ok(())
    }

    /// Answers for the attributes that differ between device memory and host memory.
    fn of_device(
        &self,
        state: &State,
        attribute: c_uint,
        address: u64,
        start: u64,
        mapping: &Mapping,
    ) -> Outcome {
        let is_managed = matches!(mapping.kind, Kind::Managed);
        let is_virtual = matches!(mapping.kind, Kind::Virtual { .. });
        let device = mapping.physical.device;
        match attribute {
            // The manual: mapped handles belong to no context.
            CU_POINTER_ATTRIBUTE_CONTEXT => {
                let context = state.devices[device].context.as_ref();
                let name = context
                    .filter(|_| !is_virtual)
                    .map_or(0, |context| context.name);
                self.set::<CUcontext>(name)
            }
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE => self.set::<c_uint>(CU_MEMORYTYPE_DEVICE),
            CU_POINTER_ATTRIBUTE_HOST_POINTER if is_managed => self.set::<u64>(address),
            // The start address identifies the memory: it is not reused while the memory exists.
            CU_POINTER_ATTRIBUTE_BUFFER_ID => self.set::<u64>(start),
            CU_POINTER_ATTRIBUTE_IS_MANAGED => self.set::<bool>(is_managed),
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => self.set::<c_int>(ordinal(device)),
            CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => {
                self.set::<bool>(matches!(mapping.kind, Kind::Allocation))
            }
            CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES => {
                self.set::<u64>(mapping.physical.properties.requested_handle_types.into())
            }
            _ => Err(CUresult::INVALID_VALUE),
        }
    }
}
