//go:build !vanward_pkgconfig

package vanward

// Where the header and the library are not in the compiler's own folders, CGO_CFLAGS and CGO_LDFLAGS name theirs.

// #cgo LDFLAGS: -lvanward
import "C"
