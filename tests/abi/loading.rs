//! Calls in the first and in the last moments of a process: in a constructor of a library, while the loader's lock keeps the session's
//! threads from beginning, and in destructors, when a thread has destroyed its own data.

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

/// Calls that fail, and the release of a session, in a thread, in the destructor of its data, and where the process ends.
const LAST_CALLS: &str = r#"
#include "vanward.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
static pthread_key_t key;
static vwd_session *session;
static void fail(void *place) {
  char text[64] = "not written";
  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = 77;
  vwd_session *none = NULL;
  vwd_status status = vwd_session_create(&options, &none);
  size_t length = vwd_last_error(text, sizeof text);
  printf("%s: %d, %s\n", (const char *)place, (int)status, length ? "a message" : text[0] ? text : "no message");
}
static void release(void) {
  vwd_session_release(session);
  fail("end of the process");
}
static void *run(void *unused) {
  pthread_setspecific(key, "end of the thread");
  fail("in the thread");
  return unused;
}
int main(void) {
  vwd_session_options options = VWD_SESSION_OPTIONS_INIT;
  options.device = VWD_DEVICE_CPU;
  options.threads = 2;
  pthread_t thread;
  if (vwd_session_create(&options, &session) || atexit(release) || pthread_key_create(&key, fail)) return 1;
  if (pthread_create(&thread, NULL, run, NULL) || pthread_join(thread, NULL)) return 1;
  fail("in main");
  return 0;
}
"#;

/// Where this test's programs lie, beside the library under the name by which the loader looks for it.
struct Folder {
    path: PathBuf,
    library: PathBuf,
}

impl Folder {
    fn create(name: &str) -> Folder {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        std::fs::create_dir_all(&path).expect("a folder");
        let named = path.join(format!("libvanward.so.{}", vanward::abi::VWD_ABI_VERSION));
        let _ = std::fs::remove_file(&named);
        std::os::unix::fs::symlink(library(), &named).expect("a link");
        Folder { path, library: named }
    }

    fn compile(&self, name: &str, source: &str, arguments: &[&str]) -> PathBuf {
        let (file, result) = (self.path.join(name).with_extension("c"), self.path.join(name));
        std::fs::write(&file, source).expect("write the source");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
        let mut command = Command::new(compiler);
        output(command.arg("-I").arg(root().join("include")).arg(&file).args(arguments).arg("-o").arg(&result));
        result
    }

    /// Arguments with which a program or library is linked to Vanward.
    fn linked(&self) -> [String; 2] {
        [self.library.to_string_lossy().into_owned(), format!("-Wl,-rpath,{}", self.path.display())]
    }
}

#[test]
fn constructor_of_a_library_may_create_a_session() {
    let folder = Folder::create("loading");
    let [vanward, path] = folder.linked();
    let holder = folder.compile("holder.so", HOLDER, &["-shared", "-fPIC", &vanward, &path]);
    let program = folder.compile("program", PROGRAM, &["-ldl"]);
    assert_eq!(output(Command::new(program).arg(holder)), "512");
}

#[test]
fn destructors_may_call_when_a_thread_has_destroyed_its_data() {
    let folder = Folder::create("ending");
    let [vanward, path] = folder.linked();
    let program = folder.compile("last_calls", LAST_CALLS, &["-pthread", &vanward, &path]);
    let lines = [
        "in the thread: 1, a message",
        "end of the thread: 1, no message",
        "in main: 1, a message",
        "end of the process: 1, no message",
    ];
    assert_eq!(output(&mut Command::new(program)), lines.join("\n") + "\n");
}
