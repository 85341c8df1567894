//! The devices and their properties.

use std::ffi::{c_char, c_int, c_uint};

use crate::calls::driver_calls;
use crate::pointers::Out;
use crate::state::device::{host_size, ordinal};
use crate::state::{State, lock};
use crate::sys::*;

driver_calls! {
    fn cuDeviceGetCount(count: Out<c_int>) {
        let count = count.required()?;
        count.set(ordinal(lock()?.devices.len()));
        Ok(())
    }

    fn cuDeviceGet(device: Out<CUdevice>, ordinal: c_int) {
        let device = device.required()?;
        lock()?.device_index(ordinal)?;
        device.set(ordinal);
        Ok(())
    }

    fn cuDeviceGetName(name: Out<c_char>, length: c_int, device: CUdevice) {
        let name = name.required()?;
        let state = lock()?;
        let number = state.devices[state.device_index(device)?].number;
        let room = usize::try_from(length).map_err(|_| CUresult::INVALID_VALUE)?;
        // A name that is too long is cut, and still ends with a zero.
        let text = format!("fakecuda device {number}");
        let mut bytes: Vec<c_char> = text.bytes().map(|byte| byte as c_char).collect();
        bytes.truncate(room.checked_sub(1).ok_or(CUresult::INVALID_VALUE)?);
        bytes.push(0);
        name.set_all(&bytes);
        Ok(())
    }

    fn cuDeviceGetUuid_v2(uuid: Out<CUuuid>, device: CUdevice) {
        let uuid = uuid.required()?;
        let state = lock()?;
        let number = state.devices[state.device_index(device)?].number;
        let mut bytes = *b"fakecuda device\0";
        bytes[15] = u8::try_from(number).map_err(|_| CUresult::INVALID_DEVICE)?;
        uuid.set(CUuuid { bytes });
        Ok(())
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: CUdevice) {
        let bytes = bytes.required()?;
        let state = lock()?;
        let index = state.device_index(device)?;
        bytes.set(host_size(state.devices[index].capacity_bytes));
        Ok(())
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: CUdevice) {
        let value = value.required()?;
        let state = lock()?;
        let index = state.device_index(device)?;
        if !(1..CU_DEVICE_ATTRIBUTE_MAX).contains(&attribute) {
            return Err(CUresult::INVALID_VALUE);
        }
        value.set(state.devices[index].attribute(attribute));
        Ok(())
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: CUdevice, peer: CUdevice) {
        let can = can.required()?;
        let state = lock()?;
        // A device is not its own peer.
        let are_two = state.device_index(device)? != state.device_index(peer)?;
        can.set(c_int::from(are_two));
        Ok(())
    }
}

impl State {
    /// Returns the index of the machine's device with this number, if this process sees it.
    pub(crate) fn index_of_number(&self, number: u64) -> Option<usize> {
        let mut devices = self.devices.iter();
        devices.position(|device| device.number as u64 == number)
    }

    /// Returns the index of a device in `devices`.
    ///
    /// # Errors
    ///
    /// `INVALID_DEVICE` if there is no such device.
    pub(crate) fn device_index(&self, device: CUdevice) -> Result<usize, CUresult> {
        let index = usize::try_from(device).map_err(|_| CUresult::INVALID_DEVICE)?;
        if index >= self.devices.len() {
            return Err(CUresult::INVALID_DEVICE);
        }
        Ok(index)
    }
}
