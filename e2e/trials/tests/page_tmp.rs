#[test]
fn page_tmp() {
    let program = std::path::Path::new("/root/.cache/rectrain/target-help/release/rectrain-page");
    if !program.exists() {
        return;
    }
    rectrain_trials::page::check(program, std::env::var_os("PAGE_UPDATE").is_some()).unwrap();
}
