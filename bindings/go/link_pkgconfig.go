//go:build vanward_pkgconfig

package vanward

// #cgo pkg-config: vanward
import "C"
