"""Everything that touches TensorFlow's graphs, kernels and allocators."""
