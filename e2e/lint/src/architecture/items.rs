//! Reads the items and imports of a Rust file.
//!
//! This is no parser: it follows brackets and keywords, which is enough for formatted code. Items
//! under `#[cfg(test)]` are left out, apart from their lines. Macro bodies are read as code.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use crate::lexer::{Kind, Token};

/// A module of a file: the file itself, or an inline `mod name { … }`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Items {
    /// Names of the structs, functions and other items that the module defines.
    pub defined: BTreeSet<String>,
    pub uses: Vec<Use>,
    /// Paths of two or more segments outside of `use`.
    pub paths: Vec<Path>,
    /// All identifiers outside of `use` declarations.
    pub words: BTreeSet<String>,
    /// `mod name;`
    pub files: Vec<ModuleFile>,
    /// `mod name { … }`
    pub inline: Vec<(String, Items)>,
    pub structs: Vec<Struct>,
}

/// One name of a `use` declaration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    pub path: Path,
    /// The name that it declares. `None` for `*`.
    pub name: Option<String>,
    /// Declared with `pub`, `pub(crate)` or the like.
    pub is_reexport: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Path {
    pub segments: Vec<String>,
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleFile {
    pub name: String,
    /// The value of `#[path = "…"]`.
    pub path: Option<String>,
    /// The module is under `#[cfg(test)]`.
    pub is_test: bool,
}

/// A struct with named fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Struct {
    pub name: String,
    pub line: usize,
    pub fields: usize,
}

/// Reads a file. `tokens` may contain comments. Returns the lines under `#[cfg(test)]` too.
pub fn read(tokens: &[Token<'_>]) -> (Items, Vec<RangeInclusive<usize>>) {
    let code: Vec<Token<'_>> = tokens.iter().filter(|token| !token.is_comment()).copied().collect();
    let mut reader = Reader { code: &code, at: 0, test_lines: Vec::new() };
    let items = reader.module();
    (items, reader.test_lines)
}

struct Reader<'a> {
    code: &'a [Token<'a>],
    at: usize,
    test_lines: Vec<RangeInclusive<usize>>,
}

/// The attributes before an item.
#[derive(Default)]
struct Attributes {
    is_test: bool,
    path: Option<String>,
}

impl<'a> Reader<'a> {
    fn peek(&self, ahead: usize) -> Option<&'a Token<'a>> {
        self.code.get(self.at + ahead)
    }

    fn peek_is(&self, ahead: usize, text: &str) -> bool {
        self.peek(ahead).is_some_and(|token| token.is(text))
    }

    /// The identifier `ahead` tokens from here.
    fn name(&self, ahead: usize) -> Option<&'a str> {
        self.peek(ahead).filter(|token| token.kind == Kind::Ident).map(|token| token.text)
    }

    /// Reads items up to the bracket that closes the module, or to the end of the file.
    fn module(&mut self) -> Items {
        let mut items = Items::default();
        let mut depth = 0usize;
        while let Some(token) = self.peek(0) {
            if token.is("#") && (self.peek_is(1, "[") || self.peek_is(1, "!")) {
                self.attributed(&mut items);
            } else if token.is("mod") && self.name(1).is_some() {
                self.module_item(&mut items, &Attributes::default());
            } else if token.is("use") && self.is_declaration() {
                self.use_declaration(&mut items.uses);
            } else if token.is("pub") && self.peek_is(1, "(") {
                self.at += 1;
                self.skip_group();
            } else if opens(token) {
                depth += 1;
                self.at += 1;
            } else if closes(token) {
                self.at += 1;
                let Some(outer) = depth.checked_sub(1) else { return items };
                depth = outer;
            } else if token.kind == Kind::Ident {
                if depth == 0 {
                    self.definition(&mut items);
                }
                self.path(&mut items);
            } else {
                self.at += 1;
            }
        }
        items
    }

    /// `use` declares names, except in `impl Trait + use<'a>`.
    fn is_declaration(&self) -> bool {
        !self.peek_is(1, "<")
    }

    /// Attributes, and the item after them if it is a test or a module.
    fn attributed(&mut self, items: &mut Items) {
        let first = self.peek(0).map_or(0, |token| token.line);
        let mut attributes = Attributes::default();
        while self.peek_is(0, "#") {
            let is_inner = self.peek_is(1, "!");
            self.at += if is_inner { 2 } else { 1 };
            let start = self.at;
            self.skip_group();
            attributes.read(&self.code[start..self.at], is_inner);
        }
        let is_module = self.module_keyword().is_some();
        if is_module && (attributes.is_test || attributes.path.is_some()) {
            self.at += self.module_keyword().unwrap_or(0);
            self.module_item(items, &attributes);
        } else if attributes.is_test {
            self.skip_item();
        }
        if attributes.is_test {
            let last = self.code.get(self.at.wrapping_sub(1)).map_or(first, Token::last_line);
            self.test_lines.push(first..=last);
        }
    }

    /// The distance to the `mod` of a module item, past its visibility.
    fn module_keyword(&self) -> Option<usize> {
        let mut ahead = 0;
        if self.peek_is(0, "pub") {
            ahead = 1;
            if self.peek_is(1, "(") {
                while !self.peek_is(ahead, ")") {
                    self.peek(ahead)?;
                    ahead += 1;
                }
                ahead += 1;
            }
        }
        (self.peek_is(ahead, "mod") && self.name(ahead + 1).is_some()).then_some(ahead)
    }

    /// `mod name;` or `mod name { … }`, from `mod`.
    fn module_item(&mut self, items: &mut Items, attributes: &Attributes) {
        let name = self.name(1).unwrap_or_default().to_owned();
        let has_body = self.peek_is(2, "{");
        self.at += 2;
        if !has_body {
            self.at += 1;
            items.files.push(ModuleFile { name, path: attributes.path.clone(), is_test: attributes.is_test });
        } else if attributes.is_test {
            self.skip_group();
        } else {
            self.at += 1;
            let inline = self.module();
            items.inline.push((name, inline));
        }
    }

    /// From an opening bracket past the one that closes it. Anything else is skipped alone.
    fn skip_group(&mut self) {
        let mut depth = 0usize;
        while let Some(token) = self.peek(0) {
            self.at += 1;
            if opens(token) {
                depth += 1;
            } else if closes(token) {
                depth = depth.saturating_sub(1);
            }
            if depth == 0 {
                return;
            }
        }
    }

    /// Past the item, field, variant, arm or statement that starts here.
    fn skip_item(&mut self) {
        let is_item = self.peek(0).is_some_and(|token| ITEM_STARTS.contains(&token.text));
        let mut has_body = false;
        let mut has_value = false;
        while let Some(token) = self.peek(0) {
            if closes(token) {
                return;
            }
            has_body |= token.is("fn") || token.is("impl") || token.is("trait");
            // The braces of `const A: B = { … };` and of `use a::{b};` do not end the item.
            has_value |= (token.is("=") && !has_body) || token.is("use");
            let is_end = token.is(";") || (token.is(",") && !is_item) || (token.is("{") && !has_value);
            self.skip_group();
            if is_end {
                return;
            }
        }
    }

    /// Records the name that an item keyword introduces, without moving on.
    fn definition(&mut self, items: &mut Items) {
        let Some(token) = self.peek(0) else { return };
        let name = match token.text {
            "struct" | "enum" | "union" | "trait" | "type" | "fn" | "const" | "static" => self.name(1),
            "macro_rules" if self.peek_is(1, "!") => self.name(2),
            _ => None,
        };
        let name = if name == Some("mut") { self.name(2) } else { name };
        let is_pointer = self.at.checked_sub(1).is_some_and(|before| self.code[before].is("*"));
        let Some(name) = name.filter(|name| !is_pointer && !matches!(*name, "fn" | "unsafe" | "async" | "_")) else {
            return;
        };
        items.defined.insert(name.to_owned());
        if token.is("struct") {
            let fields = fields(&self.code[self.at + 2..]);
            items.structs.extend(fields.map(|fields| Struct { name: name.to_owned(), line: token.line, fields }));
        }
    }

    /// A path or a single identifier, outside of `use`.
    fn path(&mut self, items: &mut Items) {
        let Some(first) = self.peek(0) else { return };
        let is_continued = self.follows_path();
        let mut segments = vec![first.text.to_owned()];
        self.at += 1;
        while self.peek_is(0, ":") && self.peek_is(1, ":") && self.name(2).is_some() {
            segments.extend(self.name(2).map(str::to_owned));
            self.at += 3;
        }
        if is_continued {
            return;
        }
        items.words.insert(first.text.to_owned());
        if segments.len() > 1 {
            items.paths.push(Path { segments, line: first.line });
        }
    }

    /// Whether the identifier here is a field or method, a macro variable, or continues a path.
    fn follows_path(&self) -> bool {
        let before = |back: usize, text: &str| {
            self.at.checked_sub(back).and_then(|at| self.code.get(at)).is_some_and(|token| token.is(text))
        };
        let is_member = before(1, ".") && !before(2, ".");
        let is_variable = before(1, "$") && !self.peek_is(0, "crate");
        let is_segment = before(1, ":") && before(2, ":");
        is_member || is_variable || is_segment
    }

    fn use_declaration(&mut self, uses: &mut Vec<Use>) {
        let before = self.at.checked_sub(1).and_then(|at| self.code.get(at));
        let is_reexport = before.is_some_and(|before| before.is("pub") || before.is(")"));
        let first = uses.len();
        self.at += 1;
        self.use_tree(Vec::new(), uses);
        for declared in &mut uses[first..] {
            declared.is_reexport = is_reexport;
        }
    }

    /// The rest of a `use` declaration after `prefix::`, past its `;`, `,` or closing brace.
    fn use_tree(&mut self, prefix: Vec<String>, uses: &mut Vec<Use>) {
        let mut segments = prefix;
        let mut name = None;
        while let Some(token) = self.peek(0) {
            if token.is("{") {
                self.at += 1;
                while !self.peek_is(0, "}") && self.peek(0).is_some() {
                    self.use_tree(segments.clone(), uses);
                }
                self.at += 1;
                segments.clear();
            } else if token.is("*") {
                self.at += 1;
                let path = Path { segments: std::mem::take(&mut segments), line: token.line };
                uses.push(Use { path, name: None, is_reexport: false });
            } else if token.is("as") {
                name = self.name(1);
                self.at += 2;
            } else if token.kind == Kind::Ident {
                segments.push(token.text.to_owned());
                self.at += 1;
            } else if token.is(":") {
                self.at += 1;
            } else {
                break;
            }
        }
        let line = self.code.get(self.at.wrapping_sub(1)).map_or(0, |token| token.line);
        if !self.peek_is(0, "}") {
            self.at += 1;
        }
        push_use(segments, name, line, uses);
    }
}

/// Records a path of a `use` declaration. `a::b::self` declares `b`.
fn push_use(mut segments: Vec<String>, alias: Option<&str>, line: usize, uses: &mut Vec<Use>) {
    if segments.len() > 1 && segments.last().is_some_and(|last| last == "self") {
        segments.pop();
    }
    let Some(last) = segments.last() else { return };
    let name = Some(alias.unwrap_or(last).to_owned());
    uses.push(Use { path: Path { segments, line }, name, is_reexport: false });
}

/// Keywords that start an item, after its attributes.
const ITEM_STARTS: &[&str] = &[
    "pub",
    "fn",
    "struct",
    "enum",
    "union",
    "trait",
    "impl",
    "mod",
    "use",
    "const",
    "static",
    "type",
    "unsafe",
    "async",
    "extern",
    "macro_rules",
];

impl Attributes {
    /// Reads the group of an attribute, brackets included.
    fn read(&mut self, group: &[Token<'_>], is_inner: bool) {
        let names = |at: usize, name: &str| group.get(at).is_some_and(|token| token.is(name));
        if names(1, "cfg") && !is_inner {
            let condition = group.get(3..group.len().saturating_sub(2)).unwrap_or_default();
            self.is_test |= requires_test(condition);
        }
        if names(1, "path") && names(2, "=") {
            self.path = group.get(3).map(|literal| literal.text.trim_matches('"').to_owned());
        }
    }
}

/// Whether a condition of `cfg` holds in tests only.
fn requires_test(condition: &[Token<'_>]) -> bool {
    let Some((first, rest)) = condition.split_first() else { return false };
    match first.text {
        "test" => rest.is_empty(),
        "all" => arguments(rest).into_iter().any(requires_test),
        "any" => arguments(rest).into_iter().all(requires_test),
        _ => false,
    }
}

/// Splits `(a, b(c, d))` at its outer commas.
fn arguments<'t, 'a>(group: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    let inner = group.get(1..group.len().saturating_sub(1)).unwrap_or_default();
    let mut depth = 0usize;
    let parts = inner.split(|token| {
        if opens(token) {
            depth += 1;
        } else if closes(token) {
            depth = depth.saturating_sub(1);
        }
        token.is(",") && depth == 0
    });
    parts.filter(|part| !part.is_empty()).collect()
}

fn opens(token: &Token<'_>) -> bool {
    token.is("(") || token.is("[") || token.is("{")
}

fn closes(token: &Token<'_>) -> bool {
    token.is(")") || token.is("]") || token.is("}")
}

/// Counts the named fields of a struct from the tokens after its name. `None` for other structs.
fn fields(tokens: &[Token<'_>]) -> Option<usize> {
    // Parentheses before the braces are either bounds, as in `where F: Fn(A)`, or a tuple.
    let open = tokens.iter().position(|token| token.is("{") || token.is(";"))?;
    if !tokens[open].is("{") {
        return None;
    }
    let (mut depth, mut angles, mut fields) = (0usize, 0usize, 0);
    let mut before = &tokens[open];
    for pair in tokens[open..].windows(2) {
        let [token, next] = pair else { break };
        if opens(token) {
            depth += 1;
        } else if closes(token) {
            depth -= 1;
        } else if token.is("<") {
            angles += 1;
        } else if token.is(">") && !before.is("-") {
            angles = angles.saturating_sub(1);
        } else if token.is(":") && depth == 1 && angles == 0 && !before.is(":") && !next.is(":") {
            fields += 1;
        }
        if depth == 0 {
            break;
        }
        before = token;
    }
    Some(fields)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lexer::tokens;

    fn items(source: &str) -> Items {
        read(&tokens(source)).0
    }

    fn uses(source: &str) -> Vec<String> {
        let shown = |item: &Use| {
            let path = item.path.segments.join("::");
            item.name.as_ref().map_or_else(|| format!("{path}::*"), |name| format!("{path} as {name}"))
        };
        items(source).uses.iter().map(shown).collect()
    }

    fn paths(source: &str) -> Vec<String> {
        items(source).paths.iter().map(|path| path.segments.join("::")).collect()
    }

    fn defined(source: &str) -> Vec<String> {
        items(source).defined.into_iter().collect()
    }

    #[test]
    fn use_trees_are_flattened() {
        let source = "use a::b; pub(crate) use super::{self, c::{D, e as f}, g::*, h::{self}}; use crate::i as _;";
        let expected = ["a::b as b", "super as super", "super::c::D as D", "super::c::e as f", "super::g::*"];
        assert_eq!(uses(source), [&expected[..], &["super::h as h", "crate::i as _"]].concat());
    }

    #[test]
    fn uses_inside_functions_count() {
        assert_eq!(uses("fn f() { use super::a; g::<dyn Fn() + use<'a>>() }"), ["super::a as a"]);
    }

    #[test]
    fn paths_outside_of_use_are_found() {
        let source = "pub(in crate::z) fn f(x: crate::a::B) -> c::D { x.e::<F>(); 0..super::g::h!(); <I as self::J>::K; ::l::M }";
        assert_eq!(paths(source), ["crate::a::B", "c::D", "super::g::h", "self::J"]);
    }

    #[test]
    fn definitions_of_the_module_are_found() {
        let source = "struct A<T>(T); pub const fn b() { const C: u8 = 1; } static mut D: u8 = 0; impl A { fn e() {} }
            macro_rules! f { () => { struct G; } } trait H { type I; } async fn j() {} enum K { L }";
        assert_eq!(defined(source), ["A", "D", "H", "K", "b", "f", "j"]);
    }

    #[test]
    fn items_under_cfg_test_are_left_out() {
        let source = "#[cfg(test)] mod a; #[cfg(test)] pub(crate) mod b { use super::c; }
            #[cfg(test)] use d::{e}; #[cfg(all(test, unix))] fn f() { crate::g::h() } #[cfg(test)]
            #[allow(x)] const I: [u8; 1] = { crate::j::K }; struct L { #[cfg(test)] m: crate::n::O<P, Q>, r: s::T }
            #[cfg(not(test))] fn u() {}";
        let items = items(source);
        assert_eq!(items.files, [ModuleFile { name: "a".to_owned(), path: None, is_test: true }]);
        assert_eq!((items.uses, items.inline), (Vec::new(), Vec::new()));
        assert_eq!(items.paths.iter().map(|path| path.segments.join("::")).collect::<Vec<_>>(), ["s::T"]);
        assert_eq!(items.defined.into_iter().collect::<Vec<_>>(), ["L", "u"]);
    }

    #[test]
    fn only_conditions_that_need_a_test_mark_tests() {
        let is_test = |condition: &str| items(&format!("#[cfg({condition})] fn f() {{}}")).defined.is_empty();
        for condition in ["test", "all(test)", "all(unix, test, not(miri))", "any(all(test, a), all(test, b))"] {
            assert!(is_test(condition), "{condition}");
        }
        for condition in ["unix", "not(test)", "any(test, unix)", "feature = \"test\"", "all(unix, not(test))"] {
            assert!(!is_test(condition), "{condition}");
        }
    }

    #[test]
    fn lines_under_cfg_test_are_known() {
        let (_, lines) = read(&tokens("fn a() {}\n#[cfg(test)]\nmod b {\n  fn c() {}\n}\nfn d() {}"));
        assert_eq!(lines, [2..=5]);
    }

    #[test]
    fn modules_may_be_files_or_inline() {
        let items =
            items("mod a; #[path = \"x/y.rs\"] pub mod b; pub(crate) mod c { use super::d; fn e() {} } fn f() {}");
        let files: Vec<_> = items.files.iter().map(|file| (file.name.as_str(), file.path.as_deref())).collect();
        assert_eq!(files, [("a", None), ("b", Some("x/y.rs"))]);
        let (name, inline) = &items.inline[0];
        assert_eq!((name.as_str(), inline.uses.len()), ("c", 1));
        assert!(inline.defined.contains("e") && items.defined.contains("f"));
    }

    #[test]
    fn fields_of_structs_are_counted() {
        let source = "struct A; struct B(u8, u8); struct C<T: Into<u8>> where T: Fn(u8) { a: Vec<(u8, u8)>, pub(crate) b: Map<u8, d::E>,
            #[serde(default)] c: fn(x: u8) -> Option<u8>, d: [u8; 2] }";
        let structs: Vec<_> = items(source).structs.into_iter().map(|item| (item.name, item.fields)).collect();
        assert_eq!(structs, [("C".to_owned(), 4)]);
    }
}
