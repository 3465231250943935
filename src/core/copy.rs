//! Copies between strided views.

/// Copies a strided box of elements. The trailing dimensions that are contiguous in both boxes are copied as one piece.
///
/// # Safety
/// Both boxes lie in valid memory and do not overlap. Strides are in bytes.
pub unsafe fn copy_strided(
    source: *const u8,
    target: *mut u8,
    shape: &[usize],
    from: &[isize],
    to: &[isize],
    element: usize,
) {
    let mut piece = element;
    let mut dims = shape.len();
    while dims > 0 && (shape[dims - 1] == 1 || (from[dims - 1] == piece as isize && to[dims - 1] == piece as isize)) {
        piece *= shape[dims - 1];
        dims -= 1;
    }
    // SAFETY: the walk of these dimensions stays in the boxes, and at every point of it the tail is one piece.
    unsafe { copy_pieces(source, target, &shape[..dims], from, to, piece) }
}

/// # Safety
/// The conditions of [`copy_strided`] hold, and `piece` bytes are contiguous at every point of the box.
unsafe fn copy_pieces(source: *const u8, target: *mut u8, shape: &[usize], from: &[isize], to: &[isize], piece: usize) {
    // SAFETY: a point of the shape is inside both boxes, which do not overlap.
    unsafe {
        match shape {
            [] => std::ptr::copy_nonoverlapping(source, target, piece),
            [n, inner @ ..] => {
                for i in 0..*n as isize {
                    let (s, t) = (source.wrapping_offset(i * from[0]), target.wrapping_offset(i * to[0]));
                    copy_pieces(s, t, inner, &from[1..], &to[1..], piece);
                }
            }
        }
    }
}
