//! The figures of pauses and resumes.

mod common;

use common::{TestDriver, TestRegion, allocator};
use lowtide_core::{Bytes, Config, Stream};
use lowtide_region::BackupKind;

#[test]
fn what_is_copied_is_counted_each_time_and_in_all() {
    for kind in [Some(BackupKind::Host), Some(BackupKind::Disk), None] {
        let driver = TestDriver::new(Bytes::gib(1));
        let allocator = allocator(&driver, &Config::default());
        let region = TestRegion::new(1, kind, &driver, &allocator);
        let take = |mib| region.allocate(Bytes::mib(mib), Stream::DEFAULT);
        let blocks = [take(30), take(50)].map(|block| block.expect("there is room"));
        let kept = |mib| match kind {
            Some(_) => Bytes::mib(mib),
            None => Bytes::ZERO,
        };
        let figures = || region.memory.figures().expect("no call panics");

        region.pause().expect("nothing fails");
        let paused = figures();
        assert_eq!((paused.pauses, paused.resumes), (1, 0));
        assert_eq!((paused.saved, paused.last_saved), (kept(80), kept(80)));
        region.resume().expect("nothing fails");
        let resumed = figures();
        let restored = (resumed.restored, resumed.last_restored);
        assert_eq!(restored, (kept(80), kept(80)));

        // A freed block is not copied.
        let freed = region.allocator.free(blocks[0].address);
        freed.expect("it is held");
        region.pause().expect("nothing fails");
        region.resume().expect("nothing fails");
        let again = figures();
        assert_eq!((again.pauses, again.resumes), (2, 2));
        assert_eq!((again.saved, again.last_saved), (kept(130), kept(50)));
        let restored = (again.restored, again.last_restored);
        assert_eq!(restored, (kept(130), kept(50)));
    }
}
