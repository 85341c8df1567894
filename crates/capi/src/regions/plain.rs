//! Backups in the host's memory, one copy after the other.

use std::ffi::c_int;
use std::path::PathBuf;

use lowtide_core::{Bytes, DriverError};
use lowtide_region::{BackupError, BackupKind, Backups, MemoryRange};

use crate::registry;

#[derive(Debug)]
pub(crate) struct CudaBackups {
    device: lowtide_cuda::Device,
}

impl CudaBackups {
    pub(super) fn new(device: lowtide_cuda::Device) -> Result<CudaBackups, DriverError> {
        Ok(CudaBackups { device })
    }
    pub(super) fn set_directory(&mut self, _directory: PathBuf) {}
    pub(super) fn set_retain(&mut self, _retain: bool) {}
    pub(super) fn release_retained(&mut self) {}

    fn ordinal(&self) -> c_int {
        let mut devices = registry::devices_in_use().expect("not forked");
        let is_own = |&(_, allocator): &(c_int, &registry::Allocator)| {
            allocator.with_driver(|driver| driver.device().uuid() == self.device.uuid())
        };
        devices.find(is_own).expect("it is in use").0
    }
}

impl Backups for CudaBackups {
    type Backup = Vec<(MemoryRange, Vec<u8>, BackupKind)>;

    fn save(
        &mut self,
        ranges: &[MemoryRange],
        kind: BackupKind,
    ) -> Result<Self::Backup, BackupError> {
        let allocator = registry::known(self.ordinal()).expect("it is in use");
        let mut backup = Vec::new();
        for &range in ranges {
            let mut bytes = vec![0; usize::try_from(range.size.get()).expect("64 bits")];
            allocator.with_driver(|driver| driver.read(range.address, &mut bytes))?;
            backup.push((range, bytes, kind));
        }
        Ok(backup)
    }

    fn restore(
        &mut self,
        backup: &mut Self::Backup,
        ranges: &[MemoryRange],
    ) -> Result<(), BackupError> {
        let allocator = registry::known(self.ordinal()).expect("it is in use");
        for range in ranges {
            let (_, bytes, _) = backup
                .iter()
                .find(|(saved, ..)| saved.contains(*range))
                .expect("it was saved");
            allocator.with_driver(|driver| driver.write(range.address, bytes))?;
        }
        Ok(())
    }

    fn discard(&mut self, backup: Self::Backup) {
        drop(backup);
    }

    fn host_copy(backup: &Self::Backup, range: MemoryRange) -> Option<usize> {
        let mut all = backup.iter();
        let (_, bytes, kind) = all.find(|(saved, ..)| saved.contains(range))?;
        (*kind == BackupKind::Host).then(|| bytes.as_ptr().expose_provenance())
    }

    fn bytes(backup: &Self::Backup) -> (Bytes, Bytes) {
        let sum = |wanted| {
            let all = backup.iter().filter(|(.., kind)| *kind == wanted);
            all.map(|(range, ..)| range.size).sum()
        };
        (sum(BackupKind::Host), sum(BackupKind::Disk))
    }
}
