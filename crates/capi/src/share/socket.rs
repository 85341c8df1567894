//! Sockets of one machine: their names, and bytes with file descriptors.

use std::ffi::c_int;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use super::wire::PARTS_MAX;

/// Room for [`PARTS_MAX`] descriptors with their header, aligned as that must be.
const CONTROL_WORDS: usize = (16 + PARTS_MAX * size_of::<RawFd>()).div_ceil(8);

/// The prefix of the names of exporters' sockets.
pub(crate) const PREFIX: &str = "share-";

/// Returns the name of an exporter's socket.
pub(crate) fn name_of(exporter: [u8; 16]) -> String {
    format!("{PREFIX}{:032x}", u128::from_be_bytes(exporter))
}

/// Sends all of `bytes`, and the descriptors with the first of them. The caller keeps the descriptors.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let mut control = [0_u64; CONTROL_WORDS];
    let mut sent = 0;
    while sent < bytes.len() {
        let mut part = slice_of(&bytes[sent..]);
        let mut message = message_of(&mut part);
        if sent == 0 && !descriptors.is_empty() {
            attach(&mut message, &mut control, descriptors);
        }
        // SAFETY: the message's parts are `bytes` and `control`, which outlive the call and are only read.
        let count =
            unsafe { libc::sendmsg(stream.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        sent += again_if_interrupted(count)?.unwrap_or(0);
    }
    Ok(())
}

/// Fills `bytes`, and returns the descriptors that came with them.
///
/// # Errors
///
/// If the other end closed, took too long, or sent more descriptors than fit or than this process may have.
pub(crate) fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut descriptors = Vec::new();
    let mut received = 0;
    while received < bytes.len() {
        let mut control = [0_u64; CONTROL_WORDS];
        let mut part = slice_of(&bytes[received..]);
        part.iov_base = bytes[received..].as_mut_ptr().cast();
        let mut message = message_of(&mut part);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: the message's parts are `bytes` and `control`, which outlive the call.
        let count =
            unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        let Some(count) = again_if_interrupted(count)? else {
            continue;
        };
        take_descriptors(&message, &mut descriptors);
        if message.msg_flags & libc::MSG_CTRUNC != 0 {
            return Err(io::Error::other(
                "file descriptors were lost: too many are open",
            ));
        }
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        received += count;
    }
    Ok(descriptors)
}

/// Puts descriptors into a message, with `control` as the buffer for them.
fn attach(message: &mut libc::msghdr, control: &mut [u64; CONTROL_WORDS], descriptors: &[OwnedFd]) {
    assert!(descriptors.len() <= PARTS_MAX, "there is room for so many");
    let bytes = u32::try_from(size_of_val(descriptors)).expect("a few hundred bytes");
    message.msg_control = control.as_mut_ptr().cast();
    // SAFETY: computes a number.
    message.msg_controllen = unsafe { libc::CMSG_SPACE(bytes) } as usize;
    // SAFETY: `msg_control` has room for a header: it was set above.
    let header = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: computes a number.
    let length = unsafe { libc::CMSG_LEN(bytes) } as usize;
    // SAFETY: as above; the header lies in `control`, which is aligned for it.
    unsafe {
        header.write(libc::cmsghdr {
            cmsg_len: length,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        });
    }
    // SAFETY: `header` is in `control`, with `length` bytes behind its start.
    let data = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
    for (index, descriptor) in descriptors.iter().enumerate() {
        // SAFETY: there is room for all descriptors, by `msg_controllen`.
        let place = unsafe { data.add(index) };
        // SAFETY: as above; written unaligned, as nothing says that it is.
        unsafe { place.write_unaligned(descriptor.as_raw_fd()) };
    }
}

/// Takes the descriptors out of a received message.
fn take_descriptors(message: &libc::msghdr, descriptors: &mut Vec<OwnedFd>) {
    // SAFETY: the kernel wrote `msg_control` and `msg_controllen`.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: it is not null, so it is a header that the kernel wrote.
        let found = unsafe { header.read() };
        if found.cmsg_level == libc::SOL_SOCKET && found.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: computes a number.
            let start = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = (found.cmsg_len - start) / size_of::<RawFd>();
            // SAFETY: as for `found`.
            let data = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            for index in 0..count {
                // SAFETY: the kernel wrote so many.
                let place = unsafe { data.add(index) };
                // SAFETY: as above.
                let number = unsafe { place.read_unaligned() };
                // SAFETY: the kernel opened it for this process, and no one else knows it.
                descriptors.push(unsafe { OwnedFd::from_raw_fd(number) });
            }
        }
        // SAFETY: both are as the kernel wrote them.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}

fn slice_of(bytes: &[u8]) -> libc::iovec {
    libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    }
}

/// Returns a message of one part, with nothing attached.
fn message_of(part: &mut libc::iovec) -> libc::msghdr {
    // SAFETY: all zeros are a message of nothing: null pointers and lengths of 0.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message
}

/// Returns a call's result; `None` if a signal interrupted the call.
fn again_if_interrupted(count: isize) -> io::Result<Option<usize>> {
    if let Ok(count) = usize::try_from(count) {
        return Ok(Some(count));
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::Interrupted => Ok(None),
        error => Err(error),
    }
}

const _: () = assert!(size_of::<c_int>() == size_of::<RawFd>());

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use lowtide_sockets::is_same_user;

    use super::*;

    #[test]
    fn descriptors_come_with_the_bytes() {
        let (here, there) = UnixStream::pair().unwrap();
        assert!(is_same_user(&here).unwrap());
        let mut pipe = [0; 2];
        // SAFETY: two numbers may be written to.
        assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
        // SAFETY: both were opened above.
        let ends = pipe.map(|end| unsafe { OwnedFd::from_raw_fd(end) });
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let all: Vec<OwnedFd> = ends
            .into_iter()
            .chain((2..PARTS_MAX).map(|_| null()))
            .collect();
        send(&here, b"two ends", &all).unwrap();
        send(&here, b"none", &[]).unwrap();
        drop(all);
        let mut bytes = [0; 8];
        let mut received = receive(&there, &mut bytes).unwrap();
        assert_eq!(&bytes, b"two ends");
        assert_eq!(received.len(), PARTS_MAX);
        let mut files = received.drain(..).map(File::from);
        let (mut reader, mut writer) = (files.next().unwrap(), files.next().unwrap());
        std::io::Write::write_all(&mut writer, b"x").unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        assert!(receive(&there, &mut bytes[..4]).unwrap().is_empty());
        assert_eq!(&bytes[..4], b"none");
        drop(here);
        let end = receive(&there, &mut bytes).unwrap_err();
        assert_eq!(end.kind(), io::ErrorKind::UnexpectedEof);
        // No signal is raised for it, or this test would have been killed.
        assert!(send(&there, b"too late", &[]).is_err());
    }

    /// Needs the right to become another user, as tests in a container often have.
    #[test]
    fn another_user_is_not_this_one() {
        let become_nobody = || {
            let (keep, nobody) = (-1, 65_534);
            // The system call and not the C library's function: for this thread alone.
            // SAFETY: takes numbers only.
            unsafe { libc::syscall(libc::SYS_setresuid, keep, nobody, keep) == 0 }
        };
        let (here, _there) = UnixStream::pair().unwrap();
        let found = std::thread::spawn(move || {
            assert!(is_same_user(&here).unwrap());
            become_nobody().then(|| is_same_user(&here).unwrap())
        });
        assert_ne!(found.join().unwrap(), Some(true));
    }
}
