//! The part of HTTP that Prometheus needs: one page, one request per connection.
//!
//! A slow or invalid client blocks one of lowtide's eight threads for at most two seconds. The job is not
//! affected.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::threads::accept_all;

/// The time limit for receiving a request and for sending its answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// The maximum size of a request; the path and headers come from anyone.
const REQUEST_BYTES_MAX: usize = 8 << 10;
/// The maximum number of connections. Further ones are closed at once.
const CONNECTIONS_MAX: usize = 8;

/// Answers requests with the result of `page`, and never returns.
pub(super) fn serve(
    listener: &TcpListener,
    page: impl Fn() -> Result<String, Error> + Copy + Send + 'static,
) {
    // Each connection that is being served holds a reference. Only this thread adds connections.
    let busy = Arc::new(());
    let accept = || listener.accept().map(|(stream, _)| stream);
    accept_all(accept, |stream| {
        if Arc::strong_count(&busy) > CONNECTIONS_MAX {
            return;
        }
        let place = Arc::clone(&busy);
        let thread = thread::Builder::new().name("lowtide-metrics".to_owned());
        // If no thread can be started, the connection is closed, as with too many connections.
        let _ = thread.spawn(move || {
            let _place = place;
            // A client that disconnects early does not need the answer.
            let _ = answer(&stream, page);
        });
    });
}

fn answer(stream: &TcpStream, page: impl Fn() -> Result<String, Error>) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let (status, body) = match read_request(stream, deadline)? {
        None => ("400 Bad Request", "not a request\n".to_owned()),
        Some(request) => match request.as_str() {
            "GET /metrics" | "HEAD /metrics" => match page() {
                Ok(text) => ("200 OK", text),
                Err(error) => ("500 Internal Server Error", error.text + "\n"),
            },
            "GET /" => ("200 OK", "lowtide: /metrics\n".to_owned()),
            other if other.starts_with("GET ") => ("404 Not Found", "try /metrics\n".to_owned()),
            _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
        },
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let mut stream = stream;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all((head + &body).as_bytes())?;
    stream.shutdown(Shutdown::Write)
}

/// Returns the method and path of a request, such as `GET /metrics`; `None` if it is not a request.
fn read_request(mut stream: &TcpStream, deadline: Instant) -> io::Result<Option<String>> {
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|window| window == b"\r\n\r\n") {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || request.len() > REQUEST_BYTES_MAX {
            return Ok(None);
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => return Ok(None),
            Ok(count) => request.extend_from_slice(&part[..count]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(parse(&request))
}

fn parse(request: &[u8]) -> Option<String> {
    let line = request.split(|&byte| byte == b'\r').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split(' ');
    let (method, path, version) = (words.next()?, words.next()?, words.next()?);
    let path = path.split('?').next()?;
    let is_http = version.starts_with("HTTP/1.") && words.next().is_none();
    is_http.then(|| format!("{method} {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the first line and the body of the answer; empty texts if the connection is closed.
    fn ask(address: std::net::SocketAddr, request: &[u8]) -> (String, String) {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut text = String::new();
        // If too many connections are open, the server may close this one at any point.
        let _ = stream.write_all(request);
        let _ = stream.read_to_string(&mut text);
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
        (
            head.lines().next().unwrap_or("").to_owned(),
            body.to_owned(),
        )
    }

    #[test]
    fn one_page_is_served_whatever_others_do() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener, || Ok("lowtide_x 1\n".to_owned())));
        // These clients send nothing, or half a request, and keep the connection open.
        let _slow: Vec<TcpStream> = (0..CONNECTIONS_MAX - 1)
            .map(|index| {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.write_all(&b"GET /metr"[..index]).unwrap();
                stream
            })
            .collect();
        let found = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert_eq!(
            found,
            ("HTTP/1.1 200 OK".to_owned(), "lowtide_x 1\n".to_owned())
        );
        let lines = [
            (
                &b"GET /other?x HTTP/1.0\r\n\r\n"[..],
                "HTTP/1.1 404 Not Found",
            ),
            (
                b"POST /metrics HTTP/1.1\r\n\r\n",
                "HTTP/1.1 405 Method Not Allowed",
            ),
            (b"\xff\xfe\r\n\r\n", "HTTP/1.1 400 Bad Request"),
            (b"GET /metrics\r\n\r\n", "HTTP/1.1 400 Bad Request"),
        ];
        for (request, expected) in lines {
            // The server may notice the end of a connection a moment later.
            let mut first = String::new();
            while first.is_empty() {
                first = ask(address, request).0;
            }
            assert_eq!(first, expected);
        }
    }

    #[test]
    fn a_request_that_never_ends_is_none() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        client
            .write_all(&vec![b'x'; REQUEST_BYTES_MAX + 2000])
            .unwrap();
        let far = Instant::now() + Duration::from_secs(60);
        assert_eq!(read_request(&server, far).unwrap(), None);
        let past = Instant::now();
        assert_eq!(read_request(&server, past).unwrap(), None);
    }
}
