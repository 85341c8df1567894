//! Classifies the frames of a stack by whose code they are.

use lowtide_trace::Frame;

/// The owner of a frame's code, as far as its function name and its file show it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Owner {
    /// The program itself.
    Program,
    /// A Python package that the program uses, such as one of models.
    Package,
    /// PyTorch's Python code.
    PyTorch,
    /// One of PyTorch's operators, or the backward pass of one. [`operator_of`] returns its name.
    Operator,
    /// Python itself, or compiled code. It shows how memory was allocated, but not for what.
    Runtime,
}

/// Parts of the paths of Python's packages.
const PACKAGE_PATHS: [&str; 2] = ["site-packages/", "dist-packages/"];

/// Parts of the paths of PyTorch's Python code, if it is not in the directory of packages: of a build from source, or of
/// `pip install --target`. Also of what `torch.compile` writes.
const PYTORCH_PATHS: [&str; 14] = [
    "/torch/nn/modules/",
    "/torch/nn/parallel/",
    "/torch/nn/functional.py",
    "/torch/nn/init.py",
    "/torch/optim/",
    "/torch/autograd/",
    "/torch/distributed/",
    "/torch/utils/",
    "/torch/cuda/",
    "/torch/amp/",
    "/torch/fx/",
    "/torch/functional.py",
    "/torch/_",
    "/torchinductor_",
];

/// Parts of the paths of Python's standard library.
const STANDARD_PATHS: [&str; 2] = ["lib/python3.", "lib64/python3."];

/// Parts of the paths of compiled code in debug information: PyTorch's, pybind11's, those of the C and the C++ library.
const COMPILED_PATHS: [&str; 9] = [
    "/torch/csrc/",
    "/aten/src/",
    "/c10/",
    "/pybind11/",
    "/sysdeps/",
    "/csu/",
    "/nptl/",
    "/libstdc++-v3/",
    "/include/c++/",
];

/// The prefixes of functions of PyTorch, Python, and the C++ library.
const COMPILED_FUNCTIONS: [&str; 9] = [
    "at::",
    "c10::",
    "torch::",
    "pybind11::",
    "caffe2::",
    "std::",
    "__gnu_cxx::",
    "_Py",
    "THPVariable",
];

impl Owner {
    /// Returns the owner of a frame's code.
    pub fn of(frame: Frame<'_>) -> Owner {
        let (name, file) = (frame.name.raw(), frame.filename.raw());
        if operator_of(name).is_some() {
            return Owner::Operator;
        }
        // A frame without a file is in a compiled library. Python's own modules are called `<frozen …>`.
        let is_file = !matches!(file, "" | "??") && !file.starts_with("<frozen ");
        if !is_file || is_of_runtime(name, file, frame.line) {
            return Owner::Runtime;
        }
        let in_packages = |path: &&str| file.split_once(*path).map(|(_, inside)| inside);
        let has = |paths: &[&str]| paths.iter().any(|path| file.contains(path));
        match PACKAGE_PATHS.iter().find_map(in_packages) {
            Some(inside) if inside.starts_with("torch/") => Owner::PyTorch,
            Some(_) => Owner::Package,
            // Code that PyTorch's tracers made from the program's.
            None if has(&PYTORCH_PATHS) || file.starts_with("<eval_with_key>") => Owner::PyTorch,
            None if has(&STANDARD_PATHS) => Owner::Runtime,
            None => Owner::Program,
        }
    }
}

/// Returns whether compiled code is not the program's. Without debug information, it has no line, and nothing tells the
/// program's from that of libraries: then the Python code that called it says more.
fn is_of_runtime(name: &str, file: &str, line: u32) -> bool {
    let is_python = file.ends_with(".py") || file.starts_with('<');
    // Since PyTorch 2.15, code without debug information has its binary as its file, and its address as its line.
    let is_object = file.ends_with(".so") || file.contains(".so.") || is_interpreter(file);
    let is_known = COMPILED_FUNCTIONS
        .iter()
        .any(|begin| name.starts_with(begin))
        || COMPILED_PATHS.iter().any(|path| file.contains(path))
        || is_of_cpython(file);
    !is_python && (line == 0 || is_object || is_known)
}

/// Returns whether a file is Python's program, such as `/usr/bin/python3.11`.
fn is_interpreter(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    let version = name.strip_prefix("python");
    version.is_some_and(|version| version.chars().all(|it| it.is_ascii_digit() || it == '.'))
}

/// Returns whether a C file is one of Python's, as `/build/python-build.1/Python-3.11.7/Modules/_ctypes/callproc.c`,
/// `/opt/conda/conda-bld/python-split_1648465063888/work/Objects/call.c` and `../Python/ceval.c` are.
fn is_of_cpython(file: &str) -> bool {
    const FOLDERS: [&str; 6] = [
        "Objects", "Python", "Modules", "Include", "Programs", "Parser",
    ];
    let folders: Vec<&str> = file.split('/').filter(|folder| *folder != ".").collect();
    let Some(inside) = folders.iter().position(|folder| FOLDERS.contains(folder)) else {
        return false;
    };
    let is_root = |folder: &&str| {
        let folder = folder.to_ascii_lowercase();
        folder.starts_with("python") || folder.starts_with("cpython")
    };
    let outside = &folders[..inside];
    let is_c = file.ends_with(".c") || file.ends_with(".h");
    is_c && (outside.iter().any(is_root) || outside == [".."])
}

/// Returns the name of the operator whose frame this is: `zeros_like` of `at::_ops::zeros_like::call(…)`, and
/// `AddmmBackward0` of `torch::autograd::generated::AddmmBackward0::apply(…)`. `None` for other functions.
pub fn operator_of(function: &str) -> Option<&str> {
    let between = |begin, end| function.strip_prefix(begin)?.split_once(end);
    let found = between("at::_ops::", "::call(")
        .or_else(|| between("torch::autograd::generated::", "::apply("));
    found.map(|(name, _)| name)
}

/// Returns a Python function's name without its class: `forward` of `Block.forward`, as lowtide's own recordings have it.
pub(crate) fn without_class(function: &str) -> &str {
    function.rsplit('.').next().unwrap_or(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(cases: &[(&str, &str, u32, Owner)]) {
        for &(name, file, line, owner) in cases {
            let frame = Frame {
                name: name.into(),
                filename: file.into(),
                line,
            };
            assert_eq!(Owner::of(frame), owner, "{name} {file}");
        }
    }

    #[test]
    fn python_code_is_told_apart_by_its_file() {
        use Owner::{Package, Program, PyTorch, Runtime};
        let site = |path: &str| format!("/venv/lib/python3.12/site-packages/{path}");
        check(&[
            ("forward", "/usr/lib/python3/dist-packages/x.py", 1, Package),
            ("forward", &site("x/y.py"), 1, Package),
            ("linear", &site("torch/nn/functional.py"), 134, PyTorch),
            ("step", "/target/packages/torch/optim/adam.py", 200, PyTorch),
            ("inner", "/src/pytorch/torch/_compile.py", 54, PyTorch),
            (
                "unshard",
                "/src/pytorch/torch/distributed/fsdp/x.py",
                9,
                PyTorch,
            ),
            ("call", "/scratch/torchinductor_me/ab/cab.py", 99, PyTorch),
            ("forward", "<eval_with_key>.12", 7, PyTorch),
            ("run", "/usr/lib/python3.12/threading.py", 1, Runtime),
            ("_find", "<frozen importlib._bootstrap>", 1, Runtime),
            ("step", "train.py", 1, Program),
            ("step", "/srv/torch/train.py", 1, Program),
            ("step", "/srv/torch/nn/train.py", 1, Program),
            ("step", "<stdin>", 1, Program),
            ("step", "/run/ipykernel_8/12.py", 1, Program),
            ("<module>", "/opt/bin/train", 3, Program),
        ]);
    }

    /// Frames of recordings on Debian's Python, which has no debug information, on one that pyenv built, and of others.
    #[test]
    fn the_code_of_python_and_the_c_library_is_no_programs() {
        const PYENV: &str = "/build/python-build.20260509073455.222/Python-3.11.7";
        let conda = "/opt/conda/conda-bld/python-split_1648465063888/work/Objects/call.c";
        let clone3 = "./misc/../sysdeps/unix/sysv/linux/x86_64/clone3.S";
        for (name, file, line) in [
            ("f", "??", 0),
            (
                "cfunction_call",
                &*format!("{PYENV}/Objects/methodobject.c"),
                542,
            ),
            (
                "is_true",
                &format!("{PYENV}/./Include/internal/pycore_call.h"),
                92,
            ),
            (
                "_call_function",
                &format!("{PYENV}/Modules/_ctypes/callproc.c"),
                11,
            ),
            ("method_vectorcall", conda, 1),
            (
                "run_mod",
                "/usr/local/src/conda/python-3.12.2/Python/pythonrun.c",
                1,
            ),
            ("pymain_main", "../Modules/main.c", 710),
            ("start_thread", "/lib/x86_64-linux-gnu/libc.so.6", 0),
            ("__libc_start_main_impl", "./csu/../csu/libc-start.c", 360),
            ("clone3", clone3, 81),
            ("_start", "/usr/bin/python3.11", 4224),
            ("Py_BytesMain", "/opt/lib/libpython3.11.so.1.0", 2_859_542),
            ("start_thread", "./nptl/./nptl/pthread_create.c", 447),
        ] {
            check(&[(name, file, line, Owner::Runtime)]);
        }
        check(&[
            ("step", "/srv/solver.cpp", 1, Owner::Program),
            ("step", "/srv/Objects/solver.cpp", 1, Owner::Program),
            ("step", "/srv/bin/python_train", 1, Owner::Program),
            ("step", "build/../Modules/solver.c", 1, Owner::Program),
        ]);
    }

    #[test]
    fn the_code_of_libraries_is_no_programs() {
        let clone = "at::_ops::clone::call(at::Tensor const&)";
        let inside = "at::_ops::clone::redispatch(c10::DispatchKeySet)";
        let backward = "torch::autograd::generated::AddmmBackward0::apply(std::vector&&)";
        let engine = "/pytorch/torch/csrc/autograd/engine.cpp";
        let (fill, kernel) = (
            "void at::native::fill<float>()",
            "tmpxft_00005690.cudafe1.cpp",
        );
        let (create, rust) = (
            "safetensors_rust::create_tensor",
            "safetensors_rust.5a1c-cgu.00",
        );
        check(&[
            ("at::empty", "any.cpp", 1, Owner::Runtime),
            ("apply", engine, 9, Owner::Runtime),
            (
                "THPVariable_clear()",
                "python_variable.cpp",
                0,
                Owner::Runtime,
            ),
            (fill, kernel, 0, Owner::Runtime),
            (create, rust, 0, Owner::Runtime),
            (clone, "??", 0, Owner::Operator),
            (inside, "??", 0, Owner::Runtime),
            (backward, "??", 0, Owner::Operator),
        ]);
    }

    #[test]
    fn operators_have_their_names() {
        for (function, expected) in [
            (
                "at::_ops::zeros_like::call(at::Tensor const&)",
                Some("zeros_like"),
            ),
            (
                "torch::autograd::generated::MmBackward0::apply(x&&)",
                Some("MmBackward0"),
            ),
            (
                "at::_ops::add_Tensor::redispatch(c10::DispatchKeySet)",
                None,
            ),
            ("at::native::add(at::_ops::x::call())", None),
            ("at::_ops::", None),
            ("", None),
        ] {
            assert_eq!(operator_of(function), expected, "{function}");
        }
    }

    #[test]
    fn a_class_is_not_part_of_a_functions_name() {
        for (function, expected) in [
            ("Block.forward", "forward"),
            ("forward", "forward"),
            ("train.<locals>.step", "step"),
            ("<module>", "<module>"),
            ("", ""),
        ] {
            assert_eq!(without_class(function), expected);
        }
    }
}
