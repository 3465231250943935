//! Elements at equal distances: the one place that steps from element to element of a view.

/// The elements of a view along one of its dimensions: an address and a stride, so that loops need not read the view again.
#[derive(Clone, Copy)]
pub struct Along<T> {
    start: *mut T,
    stride: isize,
}

impl<T: Copy> Along<T> {
    /// `stride` is in elements.
    #[inline(always)]
    pub fn new(start: *mut T, stride: isize) -> Along<T> {
        Along { start, stride }
    }

    /// The address of element `n`, which need not exist.
    #[inline(always)]
    pub fn at(self, n: usize) -> *mut T {
        self.start.wrapping_offset((n as isize).wrapping_mul(self.stride))
    }

    /// The address of the first element, if the elements follow each other without gaps.
    #[inline(always)]
    pub fn packed(self) -> Option<*const T> {
        (self.stride == 1).then_some(self.start.cast_const())
    }

    /// # Safety
    /// The view is valid and has an element `n`.
    #[inline(always)]
    pub unsafe fn get(self, n: usize) -> T {
        // SAFETY: the address is that of an element, which the caller keeps valid.
        unsafe { self.at(n).read() }
    }

    /// # Safety
    /// The conditions of [`Along::get`] hold, and no other task touches this element.
    #[inline(always)]
    pub unsafe fn set(self, n: usize, value: T) {
        // SAFETY: the address is that of an element, which the caller keeps valid and to this task.
        unsafe { self.at(n).write(value) }
    }

    /// Copies the first `places.len()` elements to `places`.
    ///
    /// # Safety
    /// The view is valid and has as many elements; `places` lie outside it.
    #[inline(always)]
    pub unsafe fn read_into(self, places: &mut [T]) {
        match self.packed() {
            // SAFETY: places.len() elements follow each other, and the places are not among them.
            Some(first) => unsafe { std::ptr::copy_nonoverlapping(first, places.as_mut_ptr(), places.len()) },
            // SAFETY: n is below the number of elements.
            None => places.iter_mut().enumerate().for_each(|(n, place)| *place = unsafe { self.get(n) }),
        }
    }

    /// Writes `values` to the first elements.
    ///
    /// # Safety
    /// The view is valid and has as many elements; `values` lie outside it, and no other task touches the elements.
    #[inline(always)]
    pub unsafe fn write_from(self, values: &[T]) {
        match self.packed() {
            // SAFETY: values.len() elements, which are this task's, follow each other, and the values are not among them.
            Some(_) => unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.start, values.len()) },
            // SAFETY: n is below the number of elements, which are this task's.
            None => values.iter().enumerate().for_each(|(n, &value)| unsafe { self.set(n, value) }),
        }
    }
}
