//! Classifies the frames of a stack by whose code they are.

use lowtide_trace::Frame;

/// The owner of a frame's code, as far as its function name and its file show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// The program itself.
    Program,
    /// A Python package that the program uses, such as one of models.
    Package,
    /// PyTorch, Python, or compiled code. It shows how memory was allocated, but not for what.
    Runtime,
}

/// Parts of the paths of Python's packages.
const PACKAGE_PATHS: [&str; 2] = ["site-packages/", "dist-packages/"];

/// Parts of the paths of Python's standard library, and of PyTorch's sources in its debug information.
const RUNTIME_PATHS: [&str; 6] = [
    "lib/python3.",
    "lib64/python3.",
    "/torch/csrc/",
    "/aten/src/",
    "/c10/",
    "/pybind11/",
];

/// The prefixes of PyTorch's C++ functions.
const RUNTIME_FUNCTIONS: [&str; 5] = ["at::", "c10::", "torch::", "pybind11::", "caffe2::"];

impl Owner {
    /// Returns the owner of a frame's code.
    pub fn of(frame: Frame<'_>) -> Owner {
        let file = frame.filename.raw();
        // A frame without a file is in a compiled library. Python's own modules are called `<frozen …>`.
        let is_file = !matches!(file, "" | "??") && !file.starts_with("<frozen ");
        let is_object = file.ends_with(".so") || file.contains(".so.");
        let begins = |begin: &&str| frame.name.raw().starts_with(*begin);
        if !is_file || is_object || RUNTIME_FUNCTIONS.iter().any(begins) {
            return Owner::Runtime;
        }
        let in_packages = |path: &&str| file.split_once(*path).map(|(_, inside)| inside);
        match PACKAGE_PATHS.iter().find_map(in_packages) {
            Some(inside) if inside.starts_with("torch/") => Owner::Runtime,
            Some(_) => Owner::Package,
            None if RUNTIME_PATHS.iter().any(|path| file.contains(path)) => Owner::Runtime,
            None => Owner::Program,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_told_apart_by_their_files_and_names() {
        for (name, filename, owner) in [
            (
                "forward",
                "/usr/lib/python3/dist-packages/x.py",
                Owner::Package,
            ),
            (
                "forward",
                "/venv/lib/python3.12/site-packages/x/y.py",
                Owner::Package,
            ),
            (
                "linear",
                "/venv/lib/python3.12/site-packages/torch/nn/functional.py",
                Owner::Runtime,
            ),
            ("run", "/usr/lib/python3.12/threading.py", Owner::Runtime),
            ("_find", "<frozen importlib._bootstrap>", Owner::Runtime),
            ("at::empty", "any.cpp", Owner::Runtime),
            (
                "apply",
                "/pytorch/torch/csrc/autograd/engine.cpp",
                Owner::Runtime,
            ),
            (
                "start_thread",
                "/lib/x86_64-linux-gnu/libc.so.6",
                Owner::Runtime,
            ),
            ("f", "??", Owner::Runtime),
            ("step", "train.py", Owner::Program),
            ("step", "/srv/torch/train.py", Owner::Program),
            ("step", "<stdin>", Owner::Program),
            ("step", "/srv/solver.cpp", Owner::Program),
        ] {
            let frame = Frame {
                name: name.into(),
                filename: filename.into(),
                line: 1,
            };
            assert_eq!(Owner::of(frame), owner, "{name} {filename}");
        }
    }
}
