# make          builds the library: target/release/libvanward.so and .a
# make test     everything that can be checked without a GPU
# make install  headers, libraries, pkg-config and CMake package; PREFIX=/usr/local, DESTDIR respected
# make setup    checks what the others need, and installs it where it can
# make header   writes include/vanward.h from the Rust declarations

PREFIX ?= /usr/local
BUILD := build

.PHONY: all setup test lint test-rust test-c install header clean

all:
	cargo build --release --lib --locked

setup:
	@.ci/setup

# --- tests: each target runs alone, too ----------------------------------------------------------------------------------

test: setup
	@python3 .ci/summary.py lint test-rust test-c

lint:
	cargo fmt --check
	cargo clippy --all-targets --locked -- -D warnings

test-rust:
	cargo test --locked

test-c: $(BUILD)/Makefile
	cmake --build $(BUILD) --parallel
	ctest --test-dir $(BUILD) --output-on-failure

$(BUILD)/Makefile: CMakeLists.txt
	cmake -S . -B $(BUILD) -G "Unix Makefiles" -DCMAKE_BUILD_TYPE=Release

# --- the rest ------------------------------------------------------------------------------------------------------------

install: $(BUILD)/Makefile
	cmake --build $(BUILD) --target vanward_library
	DESTDIR=$(DESTDIR) cmake --install $(BUILD) --prefix $(abspath $(PREFIX))

header:
	VANWARD_WRITE_HEADER=1 cargo test --locked --test header

clean:
	cargo clean
	rm -rf $(BUILD)
