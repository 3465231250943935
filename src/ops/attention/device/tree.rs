//! Parameters of the kernel of kernels/attention_tree/.

use super::params;
use crate::ops::attention::Tree;
use crate::runtime::cuda::layout::kernel_struct;
use crate::runtime::cuda::views::View;

kernel_struct! {
    /// Mirrors TreeAttentionParams.
    pub struct Params {
        to: params::Params,
        tree: View<3>,
    }
}

impl Params {
    pub fn new(to: &params::Params, tree: &Tree) -> Params {
        Params { to: *to, tree: View::new(&tree.0, [0, 1, 2]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::cuda::layout;

    #[test]
    fn kernels_read_the_parameters_where_they_lie() {
        layout::check("attention_tree", file!(), &[Params::layout("TreeAttentionParams")]);
    }
}
