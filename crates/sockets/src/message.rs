//! Bytes with file descriptors.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::cmsg_space;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors that are sent at once. Linux accepts 253, and processes often may have only 1,024.
pub const DESCRIPTORS_MAX: usize = 64;

const CONTROL_BYTES: usize = cmsg_space!(ScmRights(DESCRIPTORS_MAX));

/// Sends all of `bytes`, and the descriptors with the first of them. The caller keeps the descriptors.
///
/// # Errors
///
/// The system's error.
///
/// # Panics
///
/// If there are more than [`DESCRIPTORS_MAX`] descriptors.
pub fn send(stream: &UnixStream, bytes: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        let has_room = control.push(SendAncillaryMessage::ScmRights(&borrowed));
        assert!(has_room, "there is room for so many");
    }
    let mut sent = 0;
    while sent < bytes.len() {
        let part = [IoSlice::new(&bytes[sent..])];
        sent += retry_on_intr(|| sendmsg(stream, &part, &mut control, SendFlags::NOSIGNAL))?;
        control.clear();
    }
    Ok(())
}

/// Fills `bytes`, and returns the descriptors that came with them.
///
/// # Errors
///
/// If the other end closed, took too long, or sent more descriptors than fit or than this process may have.
pub fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut descriptors = Vec::new();
    let mut received = 0;
    while received < bytes.len() {
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut part = [IoSliceMut::new(&mut bytes[received..])];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let message = retry_on_intr(|| recvmsg(stream, &mut part, &mut control, flags))?;
        for attached in control.drain() {
            if let RecvAncillaryMessage::ScmRights(attached) = attached {
                descriptors.extend(attached);
            }
        }
        if message.flags.contains(ReturnFlags::CTRUNC) {
            let text = "file descriptors were lost: too many are open";
            return Err(io::Error::other(text));
        }
        if message.bytes == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        received += message.bytes;
    }
    Ok(descriptors)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use super::*;
    use crate::is_same_user;

    #[test]
    fn descriptors_come_with_the_bytes() {
        let (here, there) = UnixStream::pair().unwrap();
        assert!(is_same_user(&here).unwrap());
        let (reader, writer) = io::pipe().unwrap();
        let ends = [OwnedFd::from(reader), OwnedFd::from(writer)];
        let null = || OwnedFd::from(File::open("/dev/null").unwrap());
        let others = (2..DESCRIPTORS_MAX).map(|_| null());
        let all: Vec<OwnedFd> = ends.into_iter().chain(others).collect();
        send(&here, b"two ends", &all).unwrap();
        send(&here, b"none", &[]).unwrap();
        drop(all);
        let mut bytes = [0; 8];
        let mut received = receive(&there, &mut bytes).unwrap();
        assert_eq!(&bytes, b"two ends");
        assert_eq!(received.len(), DESCRIPTORS_MAX);
        let mut files = received.drain(..).map(File::from);
        let (mut reader, mut writer) = (files.next().unwrap(), files.next().unwrap());
        writer.write_all(b"x").unwrap();
        drop(writer);
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        assert!(receive(&there, &mut bytes[..4]).unwrap().is_empty());
        assert_eq!(&bytes[..4], b"none");
        drop(here);
        let end = receive(&there, &mut bytes).unwrap_err();
        assert_eq!(end.kind(), ErrorKind::UnexpectedEof);
        // No signal is raised for it, or this test would have been killed.
        assert!(send(&there, b"too late", &[]).is_err());
    }
}
