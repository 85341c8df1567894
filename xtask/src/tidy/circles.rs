//! A rule against circular dependencies between the files of a crate, so that files can be read in order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt as _;
use syn::visit::{self, Visit};
use syn::{Attribute, Ident, Item, ItemMod, ItemUse, Macro, UseTree, Visibility};

use super::finding::Finding;
use super::tree::Tree;

/// The directories whose files may form a circle. Replaced driver functions look each other up by name, so the
/// circle cannot be avoided.
const ALLOWED: [&str; 1] = ["crates/capi/src/preload/"];

/// The files of a crate must not use each other in a circle. Tests and method calls do not count.
pub(super) fn files_form_no_circle(tree: &Tree) -> Vec<Finding> {
    let roots = tree.paths().filter(|path| {
        let path = path.strip_suffix(".rs").unwrap_or_default();
        path.ends_with("/src/lib") || path.ends_with("/src/main")
    });
    let circles = roots.flat_map(|root| Crate::read(tree, root).circles());
    circles
        .filter(|circle| {
            !ALLOWED
                .iter()
                .any(|allowed| circle.iter().all(|(file, _)| file.starts_with(allowed)))
        })
        .map(|circle| {
            let steps = circle
                .iter()
                .map(|(file, name)| format!("{file} takes `{name}` from "));
            let (first, _) = &circle[0];
            let message = format!("a circle: {}{first}", steps.collect::<String>());
            Finding::in_file(first, message)
        })
        .collect()
}

/// A module's path from the crate's root.
type Module = Vec<String>;

/// The modules of a crate, and the paths that they use.
#[derive(Default)]
struct Crate {
    /// The file of each module.
    files: BTreeMap<Module, String>,
    /// The full path behind each name that a module imports or re-exports.
    aliases: BTreeMap<(Module, String), Vec<String>>,
    /// The paths that each module uses, from the root.
    uses: Vec<(Module, Vec<String>)>,
}

impl Crate {
    fn read(tree: &Tree, root: &str) -> Self {
        let mut read = Self::default();
        read.add_file(tree, root, Vec::new());
        read
    }

    /// Adds the module in a file, and its submodules.
    fn add_file(&mut self, tree: &Tree, path: &str, module: Module) {
        let Some(file) = tree.text(path).and_then(|text| syn::parse_file(text).ok()) else {
            return;
        };
        self.add_items(tree, path, &module, &file.items);
    }

    fn add_items(&mut self, tree: &Tree, path: &str, module: &Module, items: &[Item]) {
        self.files.insert(module.clone(), path.into());
        let mut reader = Reader {
            module,
            found: Vec::new(),
            aliases: Vec::new(),
            inner: Vec::new(),
        };
        for item in items {
            reader.visit_item(item);
        }
        let (found, aliases, inner) = (reader.found, reader.aliases, reader.inner);
        self.uses
            .extend(found.into_iter().map(|found| (module.clone(), found)));
        for (name, target) in aliases {
            self.aliases.insert((module.clone(), name), target);
        }
        for inner in inner {
            let mut below = module.clone();
            below.push(inner.ident.unraw().to_string());
            match &inner.content {
                Some((_, items)) => self.add_items(tree, path, &below, items),
                None => {
                    let file = files_of(path, module.is_empty(), inner);
                    let file = file.into_iter().find(|file| tree.text(file).is_some());
                    if let Some(file) = file {
                        self.add_file(tree, &file, below);
                    }
                }
            }
        }
    }

    /// Returns the file that defines the item at a path. Follows imports and re-exports.
    fn definer(&self, path: &[String]) -> Option<&str> {
        let mut path = path.to_vec();
        // Imports that form a cycle do not compile. Longer chains than this do not occur.
        for _ in 0..16 {
            let depth = (0..=path.len())
                .rev()
                .find(|&depth| self.files.contains_key(&path[..depth]))?;
            let name = path.get(depth).cloned();
            let alias = name.and_then(|name| self.aliases.get(&(path[..depth].to_vec(), name)));
            match alias {
                Some(target) => path = [target, &path[depth + 1..]].concat(),
                None => return self.files.get(&path[..depth]).map(String::as_str),
            }
        }
        None
    }

    /// Returns for each file the files that it uses, with one name that it takes from each.
    fn arrows(&self) -> BTreeMap<&str, BTreeMap<&str, &str>> {
        let mut arrows: BTreeMap<&str, BTreeMap<&str, &str>> = BTreeMap::new();
        for (module, path) in &self.uses {
            let from = self.files[module].as_str();
            let name = path.last().map_or("", String::as_str);
            if let Some(to) = self.definer(path).filter(|&to| to != from) {
                arrows.entry(from).or_default().entry(to).or_insert(name);
            }
        }
        arrows
    }

    /// Returns the shortest circle through each file that is in one and in none returned before. A circle lists its
    /// files with the name that each takes from the next.
    fn circles(&self) -> Vec<Vec<(String, String)>> {
        let arrows = self.arrows();
        let mut seen = BTreeSet::new();
        let mut circles = Vec::new();
        for &start in arrows.keys() {
            let Some(circle) = circle(&arrows, start).filter(|_| !seen.contains(start)) else {
                continue;
            };
            seen.extend(circle.iter().copied());
            let steps = circle.iter().zip(circle.iter().cycle().skip(1));
            let named = steps.map(|(&from, &to)| (from.into(), arrows[from][to].into()));
            circles.push(named.collect());
        }
        circles
    }
}

/// Returns the files of the shortest circle through `start`, beginning with `start`.
fn circle<'t>(
    arrows: &BTreeMap<&'t str, BTreeMap<&'t str, &'t str>>,
    start: &'t str,
) -> Option<Vec<&'t str>> {
    let mut before: BTreeMap<&str, &str> = BTreeMap::new();
    let mut next = VecDeque::from([start]);
    while let Some(file) = next.pop_front() {
        for &to in arrows.get(file).into_iter().flat_map(BTreeMap::keys) {
            if to == start {
                let mut circle = vec![file];
                while let Some(&earlier) = before.get(circle[circle.len() - 1]) {
                    circle.push(earlier);
                }
                circle.reverse();
                return Some(circle);
            }
            if !before.contains_key(to) {
                before.insert(to, file);
                next.push_back(to);
            }
        }
    }
    None
}

/// Returns the files that a module without a body may be in.
fn files_of(path: &str, is_root: bool, module: &ItemMod) -> Vec<String> {
    let (directory, file) = path.rsplit_once('/').unwrap_or(("", path));
    let stem = file.strip_suffix(".rs").unwrap_or(file);
    let own = if is_root || stem == "mod" {
        directory.to_owned()
    } else {
        format!("{directory}/{stem}")
    };
    let name = module.ident.unraw();
    vec![format!("{own}/{name}.rs"), format!("{own}/{name}/mod.rs")]
}

/// Collects the paths and imports of one module.
struct Reader<'m> {
    module: &'m Module,
    found: Vec<Vec<String>>,
    aliases: Vec<(String, Vec<String>)>,
    inner: Vec<&'m ItemMod>,
}

impl Reader<'_> {
    /// Returns a path from the crate's root, or `None` if it leads above the root.
    fn absolute(&self, path: &[String]) -> Option<Vec<String>> {
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => Some(rest.to_vec()),
            "self" => Some([self.module, rest].concat()),
            "super" => {
                let mut above = self.module.clone();
                above.pop()?;
                let mut rest = rest;
                while rest.first().is_some_and(|name| name == "super") {
                    above.pop()?;
                    rest = &rest[1..];
                }
                Some([&above, rest].concat())
            }
            // A path into this module or another crate. `definer` finds no other file for the latter.
            _ => Some([self.module, path].concat()),
        }
    }

    fn add(&mut self, path: &[String]) {
        if path.len() > 1 || path.first().is_some_and(|name| name == "super") {
            self.found.extend(self.absolute(path));
        }
    }

    fn add_use(&mut self, is_public: bool, prefix: &[String], tree: &UseTree) {
        let with = |name: &Ident| match name.unraw().to_string().as_str() {
            "self" => prefix.to_vec(),
            name => [prefix, &[name.to_owned()]].concat(),
        };
        match tree {
            UseTree::Path(path) => self.add_use(is_public, &with(&path.ident), &path.tree),
            UseTree::Group(group) => {
                for tree in &group.items {
                    self.add_use(is_public, prefix, tree);
                }
            }
            UseTree::Glob(_) => self.add(prefix),
            UseTree::Name(name) => self.add_named(is_public, &with(&name.ident), None),
            UseTree::Rename(rename) => {
                let other = Some(rename.rename.unraw().to_string());
                self.add_named(is_public, &with(&rename.ident), other);
            }
        }
    }

    /// Adds an import. A public one counts where its name is used, not here.
    fn add_named(&mut self, is_public: bool, path: &[String], other: Option<String>) {
        let name = other.or_else(|| path.last().cloned());
        if let (Some(name), Some(target)) = (name, self.absolute(path)) {
            self.aliases.push((name, target));
        }
        if !is_public {
            self.add(path);
        }
    }

    fn add_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        for token in tokens {
            match token {
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.add(&path);
                        path.clear();
                    }
                    path.push(ident.unraw().to_string());
                    colons = 0;
                }
                other => {
                    self.add(&path);
                    path.clear();
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.add_tokens(group.stream());
                    }
                }
            }
        }
        self.add(&path);
    }
}

impl<'m> Visit<'m> for Reader<'m> {
    fn visit_item(&mut self, item: &'m Item) {
        let is_test = attributes(item).iter().any(is_for_tests);
        if !is_test {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_mod(&mut self, module: &'m ItemMod) {
        self.inner.push(module);
    }

    fn visit_item_use(&mut self, item: &'m ItemUse) {
        let is_public = !matches!(item.vis, Visibility::Inherited);
        self.add_use(is_public, &[], &item.tree);
    }

    /// The path in `pub(super)` is no use of that module.
    fn visit_visibility(&mut self, _: &'m Visibility) {}

    fn visit_path(&mut self, path: &'m syn::Path) {
        let names = path
            .segments
            .iter()
            .map(|segment| segment.ident.unraw().to_string());
        self.add(&names.collect::<Vec<String>>());
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, found: &'m Macro) {
        self.add_tokens(found.tokens.clone());
        visit::visit_macro(self, found);
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns whether an attribute is a `#[cfg(…)]` whose condition names `test`, possibly among others.
fn is_for_tests(attribute: &Attribute) -> bool {
    let list = attribute.meta.require_list();
    attribute.path().is_ident("cfg") && list.is_ok_and(|list| asks_for_test(list.tokens.clone()))
}

/// Returns whether a condition contains `test` outside of `not`.
fn asks_for_test(condition: TokenStream) -> bool {
    let mut is_negated = false;
    for token in condition {
        match token {
            TokenTree::Ident(name) if name == "test" => return true,
            TokenTree::Ident(name) => is_negated = name == "not",
            TokenTree::Group(group) if !is_negated && asks_for_test(group.stream()) => return true,
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the findings for a crate of these files.
    fn check(files: &[(&str, &str)], expected: &[&str]) {
        let files: Vec<(String, &str)> = { files.iter() }
            .map(|(name, text)| (format!("a/src/{name}.rs"), *text))
            .collect();
        let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (&**name, *text)).collect();
        let found = files_form_no_circle(&Tree::of(&files));
        let found: Vec<String> = found.iter().map(Finding::to_string).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn two_files_that_use_each_other_are_a_circle() {
        let circle =
            "a/src/b.rs: a circle: a/src/b.rs takes `C` from a/src/c.rs takes `B` from a/src/b.rs";
        let lib = "mod b; mod c;";
        for c in [
            "use crate::b::B;",
            "use super::b::{B as D};",
            "fn f() -> crate::b::B {}",
            "fn f() { println!(\"{}\", crate::b::B) }",
            "mod inside { use super::super::b::B; }",
        ] {
            check(
                &[("lib", lib), ("b", "use crate::c::C;"), ("c", c)],
                &[circle],
            );
        }
    }

    #[test]
    fn tests_and_other_crates_count_for_nothing() {
        let lib = "mod b; mod c;";
        for c in [
            "#[cfg(test)] mod tests { use crate::b::B; }",
            "#[cfg(any(test, feature = \"x\"))] use crate::b::B;",
            "use std::collections::BTreeMap;",
        ] {
            check(&[("lib", lib), ("b", "use crate::c::C;"), ("c", c)], &[]);
        }
    }

    #[test]
    fn a_name_is_followed_to_where_it_is_defined() {
        let lib = "mod b; mod c; pub use c::C;";
        check(&[("lib", lib), ("b", "use crate::C;"), ("c", "")], &[]);
        let circle =
            "a/src/b.rs: a circle: a/src/b.rs takes `C` from a/src/c.rs takes `b` from a/src/b.rs";
        check(
            &[("lib", lib), ("b", "use crate::C;"), ("c", "use crate::b;")],
            &[circle],
        );
    }

    #[test]
    fn a_module_and_those_below_it_may_be_a_circle() {
        let below = ("b/d", "use super::B;");
        check(&[("lib", "mod b;"), ("b", "mod d; struct B;"), below], &[]);
        let circle = "a/src/b.rs: a circle: a/src/b.rs takes `f` from a/src/b/d.rs takes `B` from a/src/b.rs";
        check(
            &[
                ("lib", "mod b;"),
                ("b", "mod d; struct B; fn g() { d::f() }"),
                below,
            ],
            &[circle],
        );
    }
}
