//! Regular files, opened without waiting and replaced whole.

use std::fs::{File, FileType, Metadata, OpenOptions};
use std::io::{BufWriter, Error, ErrorKind, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// Opens a regular file for reading. Any other kind of file is an error at once: the kind is checked before the file is
/// opened and, in case the file was replaced meanwhile, after it was opened without blocking.
pub fn open(path: &str) -> Result<File> {
    require_regular(&std::fs::metadata(path)?)?;
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    require_regular(&file.metadata()?)?;
    Ok(file)
}

/// Writes a new file in the folder of the file that `path` names, and renames it to that file, so that `path` is never half
/// written. If `path` is a symbolic link, the file that it names is replaced. The permissions of an existing file stay.
pub fn replace(path: &str, write: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let target = behind_links(path)?;
    let permissions = match std::fs::metadata(&target) {
        Ok(about) => {
            require_regular(&about)?;
            Some(about.permissions())
        }
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let (temporary, file) = create_in_same_folder(&target, permissions.as_ref().map(|permissions| permissions.mode()))?;
    let mut buffer = BufWriter::with_capacity(1 << 20, file);
    let outcome = permissions
        // The umask may have removed permissions when the file was created.
        .map_or(Ok(()), |permissions| buffer.get_ref().set_permissions(permissions))
        .and_then(|()| write(&mut buffer))
        .and_then(|()| buffer.into_inner().map_err(|error| error.into_error()))
        .and_then(|file| file.sync_all())
        .and_then(|()| std::fs::rename(&temporary, &target));
    if outcome.is_err() {
        // The caller gets the first error, not one of this removal.
        let _ = std::fs::remove_file(&temporary);
    }
    outcome
}

/// The path at the end of symbolic links, whether or not anything is there.
fn behind_links(path: &str) -> Result<PathBuf> {
    /// The number of links that Linux follows.
    const MOST: usize = 40;
    let mut path = PathBuf::from(path);
    for _ in 0..=MOST {
        match std::fs::symlink_metadata(&path) {
            Ok(about) if about.is_symlink() => path = folder(&path).join(std::fs::read_link(&path)?),
            Ok(_) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(path),
            Err(error) => return Err(error),
        }
    }
    Err(Error::other("too many symbolic links"))
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Creates a file in the folder of `target`. Its name is short whatever the target's name, and new: a killed process may have
/// left files, and a process in another container may have the same id.
fn create_in_same_folder(target: &Path, mode: Option<u32>) -> Result<(PathBuf, File)> {
    const TRIES: usize = 100;
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(mode.unwrap_or(0o666));
    for _ in 0..TRIES {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos() as u64;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!(".vanward-{}-{count}-{now:x}.tmp", std::process::id());
        let path = folder(target).join(name);
        match options.open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(Error::other(format!("{TRIES} names for a temporary file beside it are taken")))
}

fn require_regular(about: &Metadata) -> Result<()> {
    if about.is_file() {
        return Ok(());
    }
    Err(Error::other(format!("{}; expected a regular file", describe(about.file_type()))))
}

fn describe(kind: FileType) -> &'static str {
    match kind {
        kind if kind.is_dir() => "a directory",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "not a regular file",
    }
}
