//! What a path may name, and what a save leaves behind.

use crate::*;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::sync::mpsc;
use std::time::Duration;

const SHAPE: Shape = Shape { layers: 1, input: 4, heads: 1, dim: 2, memory: false };

fn small(backend: &Backend) -> Forecast<'_> {
    fitted(backend, &mut Rng::new(1), SHAPE, 0)
}

/// Things that are no regular files, with their kinds.
fn others(folder: &Folder) -> Vec<(PathBuf, &'static str)> {
    for (name, kind) in [("fifo", libc::S_IFIFO), ("socket", libc::S_IFSOCK)] {
        // SAFETY: a NUL-terminated path.
        assert_eq!(unsafe { libc::mknod(c_path(&folder.file(name)).as_ptr(), kind | 0o600, 0) }, 0);
    }
    fs::create_dir(folder.file("directory")).unwrap();
    symlink("fifo", folder.file("link")).unwrap();
    let own = [("fifo", "a FIFO"), ("socket", "a socket"), ("directory", "a directory"), ("link", "a FIFO")];
    let global = [(PathBuf::from("/dev/zero"), "a device"), (PathBuf::from("/"), "a directory")];
    own.map(|(name, kind)| (folder.file(name), kind)).into_iter().chain(global).collect()
}

/// Runs what may hang.
fn at_once<R: Send + 'static>(work: impl FnOnce() -> R + Send + 'static) -> R {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || tell.send(work()));
    told.recv_timeout(Duration::from_secs(30)).expect("an answer at once")
}

#[test]
fn load_refuses_at_once_what_is_no_regular_file() {
    let folder = Folder::new("other-kinds");
    for (path, kind) in others(&folder) {
        let name = path.to_str().unwrap().to_string();
        let (status, message) = at_once(move || {
            let backend = Backend::cpu(1);
            let status = Forecast::load(&backend, SHAPE, &path).err();
            (status, last_error())
        });
        assert_eq!((status, message), (Some(VWD_ERROR_IO), format!("{name}: {kind}; expected a regular file")));
    }
}

#[test]
fn load_reads_nothing_behind_a_header_that_does_not_fit() {
    let backend = Backend::cpu(1);
    let folder = Folder::new("sparse");
    let path = folder.file("maps");
    // More than the memory of any machine on which this runs: a file that is read whole fails otherwise, or never ends.
    const SIZE: u64 = 1 << 42;
    let refuse = |header: &str, length: u64, pieces: &[&str]| {
        fs::write(&path, [&length.to_le_bytes()[..], header.as_bytes()].concat()).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(SIZE).unwrap();
        let status = Forecast::load(&backend, SHAPE, &path).err().expect("a bad header");
        assert_fails(status, VWD_ERROR_IO, &[&[path.to_str().unwrap()], pieces].concat());
    };
    refuse("", 0, &["header"]);
    refuse("", SIZE, &["a header of 4398046511104 bytes"]);
    refuse("", 99_000_000, &["header"]);
    let whole = |layers: u64, rows: u64| {
        let columns = 5;
        let bytes = rows * columns * 4;
        format!(
            r#"{{"__metadata__":{{"format":"vanward.forecast","version":"1","layers":"{layers}","input_dim":"4","q_heads":"1","head_dim":"2"}},"layer.0.weight":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[0,{bytes}]}}}}"#
        )
    };
    let short = whole(1, 2);
    refuse(&short, short.len() as u64, &["bytes of tensors; expected 40"]);
    // A file as long as its header says, whose map does not fit.
    let mut header = whole(1, 0);
    for _ in 0..2 {
        let rows = (SIZE - 8 - header.len() as u64) / 20;
        header = whole(1, rows);
        header += &" ".repeat(((SIZE - 8 - header.len() as u64) % 20) as usize);
    }
    refuse(&header, header.len() as u64, &["layer.0.weight", "[2, 5]"]);
}

#[test]
fn save_refuses_what_is_no_regular_file_and_leaves_it() {
    let backend = Backend::cpu(1);
    let forecast = small(&backend);
    let folder = Folder::new("save-over");
    for (path, kind) in &others(&folder) {
        let message = format!("{}: {kind}; expected a regular file", path.display());
        assert_fails(forecast.save(path), VWD_ERROR_IO, &[&message]);
    }
    let kind = |name: &str| fs::symlink_metadata(folder.file(name)).unwrap().file_type();
    assert!(kind("fifo").is_fifo() && kind("directory").is_dir() && kind("socket").is_socket());
    assert!(kind("link").is_symlink());
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 4, "no temporary file stays");
}

#[test]
fn save_through_a_link_replaces_what_it_names() {
    let backend = Backend::cpu(1);
    let forecast = small(&backend);
    let folder = Folder::new("links");
    for name in ["here", "there"] {
        fs::create_dir(folder.file(name)).unwrap();
    }
    let (link, target) = (folder.file("here/link"), folder.file("there/maps"));
    symlink("../there/maps", folder.file("here/next")).unwrap();
    symlink("next", &link).unwrap();
    // First the link leads to nothing, then to a file.
    for _ in 0..2 {
        assert_ok(forecast.save(&link));
        assert!(Forecast::load(&backend, SHAPE, &target).is_ok());
        assert!(fs::symlink_metadata(&target).unwrap().is_file());
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("next"));
        assert_eq!(fs::read_dir(folder.file("there")).unwrap().count(), 1, "no temporary file stays");
        assert_eq!(fs::read_dir(folder.file("here")).unwrap().count(), 2);
        fs::write(&target, "something else").unwrap();
    }
    symlink("round", folder.file("round")).unwrap();
    let round = folder.file("round");
    assert_fails(forecast.save(&round), VWD_ERROR_IO, &[round.to_str().unwrap(), "symbolic links"]);
    symlink("missing/maps", folder.file("astray")).unwrap();
    let astray = folder.file("astray");
    assert_fails(forecast.save(&astray), VWD_ERROR_IO, &[astray.to_str().unwrap()]);
}

#[test]
fn save_keeps_the_permissions_of_a_file_and_gives_a_new_one_those_of_the_umask() {
    let backend = Backend::cpu(1);
    let forecast = small(&backend);
    let folder = Folder::new("modes");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    let path = folder.file("maps");
    assert_ok(forecast.save(&path));
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let umask = status.lines().find_map(|line| line.strip_prefix("Umask:")).expect("Linux tells the umask").trim();
    assert_eq!(mode(&path), 0o666 & !u32::from_str_radix(umask, 8).unwrap());
    for kept in [0o600, 0o640, 0o666, 0o755] {
        fs::set_permissions(&path, Permissions::from_mode(kept)).unwrap();
        assert_ok(forecast.save(&path));
        assert_eq!(mode(&path), kept, "{kept:o}");
    }
}

#[test]
fn temporary_files_that_were_left_behind_block_no_save() {
    let backend = Backend::cpu(1);
    let forecast = small(&backend);
    let folder = Folder::new("left-behind");
    let pid = std::process::id();
    let left = (0..200).flat_map(|n| [format!("maps.{pid}-{n}.tmp"), format!(".vanward-{pid}-{n}.tmp")]);
    let left: Vec<PathBuf> = left.map(|name| folder.file(&name)).collect();
    left.iter().for_each(|path| fs::write(path, "half a forecast").unwrap());
    for _ in 0..20 {
        assert_ok(forecast.save(&folder.file("maps")));
    }
    assert!(left.iter().all(|path| fs::read(path).unwrap() == b"half a forecast"));
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), left.len() + 1);
}

#[test]
fn saves_to_one_path_from_many_threads_leave_one_whole_file() {
    let backend = Backend::cpu(1);
    let forecast = small(&backend);
    let folder = Folder::new("crowd");
    let path = folder.file("maps");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..25).for_each(|_| assert_ok(forecast.save(&path))));
        }
    });
    assert!(Forecast::load(&backend, SHAPE, &path).is_ok());
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
}

#[test]
fn names_may_be_as_long_as_the_file_system_has_them() {
    let backend = Backend::cpu(1);
    let forecast = small(&backend);
    let folder = Folder::new("names");
    for length in [1, 251, 252, 253, 254, 255] {
        let path = folder.file(&"m".repeat(length));
        assert_ok(forecast.save(&path));
        assert!(Forecast::load(&backend, SHAPE, &path).is_ok());
    }
    let path = folder.file(&"m".repeat(256));
    assert_fails(forecast.save(&path), VWD_ERROR_IO, &[path.to_str().unwrap()]);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 6, "no temporary file stays");
}
