//! A library of the caller's whose constructor creates a session: the loader's lock, held meanwhile, keeps the session's
//! threads from beginning.

use super::{library, output, root};
use std::path::PathBuf;
use std::process::Command;

/// The caller's library. Once it is loaded its session verifies, with all its threads, and is released.
const HOLDER: &str = r#"
#include "vanward.h"
enum { B = 256, GAMMA = 512 };
static int32_t draft[B][GAMMA], target[B][GAMMA + 1], accepted[B], next_token[B];
static vwd_session *session;
__attribute__((constructor)) static void create(void) {
  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = VWD_DEVICE_CPU;
  options.threads = 4;
  if (vwd_session_create(&options, &session) != VWD_OK) session = NULL;
}
static vwd_tensor ints(int32_t *data, int32_t ndim, int64_t width) {
  vwd_tensor t = VWD_TENSOR_INIT;
  t.data = data;
  t.device_type = 1;
  t.dtype_bits = 32;
  t.ndim = ndim;
  t.shape[0] = B;
  t.shape[1] = width;
  t.strides[0] = ndim == 2 ? width : 1;
  t.strides[1] = 1;
  return t;
}
int use_it(void);
int use_it(void) {
  vwd_verify_args args = VWD_VERIFY_ARGS_INIT;
  args.draft = ints(&draft[0][0], 2, GAMMA);
  args.target = ints(&target[0][0], 2, GAMMA + 1);
  args.accepted = ints(accepted, 1, 0);
  args.next_token = ints(next_token, 1, 0);
  vwd_status status = vwd_verify(session, &args, NULL);
  vwd_session_release(session);
  return status == VWD_OK ? accepted[B - 1] : -1;
}
"#;

const PROGRAM: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
int main(int count, char **paths) {
  int (*use_it)(void) = NULL;
  alarm(60); /* a hang is an error */
  void *holder = count == 2 ? dlopen(paths[1], RTLD_NOW) : NULL;
  if (holder != NULL) *(void **)&use_it = dlsym(holder, "use_it");
  printf("%d", use_it != NULL ? use_it() : -2);
  return 0;
}
"#;

#[test]
fn constructor_of_a_library_may_create_a_session() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("loading");
    std::fs::create_dir_all(&folder).expect("a folder");
    // Under the name by which the loader looks for it.
    let named = folder.join(format!("libvanward.so.{}", vanward::abi::VWD_ABI_VERSION));
    let _ = std::fs::remove_file(&named);
    std::os::unix::fs::symlink(library(), &named).expect("a link");
    let compile = |name: &str, source: &str, arguments: &[&str]| {
        let (file, result) = (folder.join(name).with_extension("c"), folder.join(name));
        std::fs::write(&file, source).expect("write the source");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let mut command = Command::new(compiler);
        output(command.arg("-I").arg(root().join("include")).arg(&file).args(arguments).arg("-o").arg(&result));
        result
    };
    let (vanward, path) = (named.to_string_lossy(), format!("-Wl,-rpath,{}", folder.display()));
    let holder = compile("holder.so", HOLDER, &["-shared", "-fPIC", &vanward, &path]);
    let program = compile("program", PROGRAM, &["-ldl"]);
    assert_eq!(output(Command::new(program).arg(holder)), "512");
}
