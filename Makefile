# make            builds the library: build/lib
# make setup      says what building and testing need, and installs it where it can
# make demo       decodes a real language model on the CPU
# make serve      serves that model over HTTP, in OpenAI's API; SERVE="--option value" as build/serve --help lists them
# make accuracy   what selection costs: attention over selected blocks beside dense attention, in that model
# make test       what every change has to pass: lint, Rust, each CUDA kernel on an emulated device, C, C++ and Python
# make test-all   everything that can be checked without a GPU, as continuous integration does
# make test-llama the long form of the tests with llama.cpp, of which test-all runs a short one
# make llama-gpu-bundle packs what times llama.cpp on a machine with a GPU; LLAMA_BUNDLE=build/llama-gpu-bundle
# make draws      draws a million tokens of each distribution of sampling, on the CPU and on a GPU where there is one
# make long-random makes a million random operations each on decoders and on caches, against dictionaries of their tokens
# make soak-serve lets 50 clients load the server for ten minutes
# make bench      measures the CPU backend
# make install    headers, libraries, pkg-config files, CMake package; PREFIX=/usr/local, DESTDIR respected
# make uninstall  removes what make install put there
# make wheel      a wheel for pip, with the library in it: build/wheel
# make deb        Debian packages of what make install installs, libvanward0 and libvanward-dev: build/packages
# make reference  docs and the contract of every call as HTML: target/doc/index.html
# make header     writes include/vanward.h, and what mirrors it, from the Rust declarations
# make notices    writes THIRD-PARTY, the licences of what the library links
# make kernels    compiles what changed of kernels/*/*.cu to the PTX that is committed
# make gpu-bundle packs what checks and times the library on a machine with a GPU; BUNDLE=build/gpu-bundle

PREFIX ?= /usr/local
# `make test` runs its parts with TIER=quick: on what the Rust tests are built of, in a folder of its own. Alone they run with TIER=all.
TIER ?= all
BUILD := build$(if $(filter quick,$(TIER)),/quick)
VENV := .cache/venv
JOBS := $(shell nproc)
MAKEFLAGS += --no-print-directory

.PHONY: all help setup demo serve soak-serve bench-serve accuracy test test-all lint test-rust test-valgrind test-c test-go test-serve test-python test-kernels \
  test-emulated emulator test-install test-llama test-llama-short llama llama-gpu-bundle bench install uninstall wheel \
  deb reference header notices kernels gpu-bundle library packaged configure clean draws long-random

all: library

help:
	@sed -n 's/^# //p; /^$$/q' Makefile

setup:
	@.ci/setup

demo: configure
	@examples/engine/quietly.sh "building the library and the engine" cmake --build $(BUILD) --parallel $(JOBS) --target vanward-engine
	@examples/engine/demo.sh $(BUILD)/examples/engine/vanward-engine

# Go does not see that the engine's sources changed; it does see that they have another sum.
engine_sum = $(shell cat examples/engine/*.[ch] include/vanward.h | cksum | tr -d ' ')
serve test-serve soak-serve bench-serve: export CGO_CFLAGS = -O2 '-I$(CURDIR)/include' '-I$(CURDIR)/examples/engine' -DENGINE_SUM=$(engine_sum)
serve test-serve soak-serve bench-serve: export CGO_LDFLAGS = '-L$(CURDIR)/$(BUILD)/examples/engine' '-L$(CURDIR)/$(BUILD)/lib' '-Wl,-rpath,$(CURDIR)/$(BUILD)/lib'

serve: configure
	@examples/engine/quietly.sh "building the library and the engine" cmake --build $(BUILD) --parallel $(JOBS) --target vanward-engine-parts
	@go build -C examples/serve -o "$(CURDIR)/$(BUILD)/serve" .
	@model=$$(examples/engine/fetch_model.sh) && set -- --model "$$model" || \
	  { echo 'SmolLM2 could not be fetched (no network?); serving a tiny random model instead.'; set -- --tiny; }; \
	  exec $(BUILD)/serve "$$@" $(SERVE)

# A text of some 4,300 tokens.
accuracy: configure
	cmake --build $(BUILD) --parallel $(JOBS) --target vanward-engine
	cat LICENSE examples/engine/prompt.txt > $(BUILD)/accuracy.txt
	examples/engine/demo.sh $(BUILD)/examples/engine/vanward-engine --accuracy --tokens 64 --prompt $(BUILD)/accuracy.txt

# --- tests: each target runs alone, too ----------------------------------------------------------------------------------

test: setup
	@TIER=quick python3 .ci/summary.py lint test-rust test-emulated test-c test-python

test-all: setup
	@TIER=all python3 .ci/summary.py lint test-rust test-valgrind test-kernels test-emulated test-c test-go test-serve test-python test-install \
	  test-llama-short

# Clippy builds nothing that the tests use: a minute and a half from a clean clone, which `make test` leaves to `make test-all`.
lint:
	cargo fmt --all --check
	$(if $(filter quick,$(TIER)),,cargo clippy --workspace --all-targets --locked -- -D warnings)

# With TIER=quick random cases run half of their rounds, and fuzzing takes half of its time.
test-rust:
	$(if $(filter quick,$(TIER)),VANWARD_ROUNDS=.5 VANWARD_FUZZ_SECONDS=12) cargo test --locked

# Fewer of the random operations on a KV cache, with an eye on every access.
test-valgrind: setup
	VANWARD_CACHE_OPERATIONS=20000 cargo test --locked --test kv_cache --config "target.'cfg(all())'.runner = 'valgrind --quiet --error-exitcode=9 \
	  --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite'" -- cache_holds

# Assembles the committed PTX for each architecture; spills and stack are failures.
test-kernels:
	python3 kernels/build.py --check-ptxas

# Runs the kernels on an emulated device (tests/emulator), which takes what instructions this processor has. CASE=name runs those alone;
# TIER=quick runs a few cases that launch every kernel.
EMULATED := build/emulator
test-emulated:
	RUSTFLAGS="-C target-cpu=native" cargo test --quiet --release --locked --package vanward-emulator --target-dir $(EMULATED)
	@$(MAKE) emulator
	tests/emulator/run.py $(EMULATED)/release --tier $(or $(TIER),all) $(CASE)

emulator:
	RUSTFLAGS="-C target-cpu=native" cargo build --quiet --release --locked --package vanward-emulator --target-dir $(EMULATED)

# Cases that count how often each token is drawn. Without a GPU those of CUDA are listed as ignored.
draws: export VANWARD_DRAWS := 1000000
draws:
	cargo test --release --locked --test conformance --no-run
	for cases in sample_draws_ variant_draws_ siblings_are_tested_alike tree_sample_commits_tokens_as_often; do \
	  cargo test --quiet --release --locked --test conformance -- --test-threads 1 --nocapture $$cases || exit 1; \
	done

# A million random operations on a decoder over pages, as many on one over a tiered cache, and as many on such a cache, each compared with a dictionary
# of what every sequence holds. What counts as one is said at the head of tests/conformance/decoder/model.rs and of tests/kv_cache/main.rs, whose
# default is a million. Without a GPU the decoder's case on CUDA is listed as ignored.
long-random: export VANWARD_DECODER_OPERATIONS := 1000000
long-random:
	cargo test --release --locked --test conformance --test kv_cache --no-run
	for cases in decoder_holds_to_a_dictionary decoder_on_a_cache_attends_what_each_strategy; do \
	  cargo test --quiet --release --locked --test conformance -- --test-threads 1 --nocapture $$cases || exit 1; \
	done
	cargo test --quiet --release --locked --test kv_cache -- --nocapture cache_holds_what_was_appended

test-c: configure
	cmake --build $(BUILD) --parallel $(JOBS)
	ctest --test-dir $(BUILD) --parallel $(JOBS) --output-on-failure $(if $(filter quick,$(TIER)),--exclude-regex '^install|valgrind$$')

# A small heap and checks of every pointer that crosses, so that the collector runs while calls do. Go does not see that
# the library changed, hence no cached results. The contents of tensors are checked, as in Python.
test-go: export VANWARD_CHECK := 1
test-go: export CGO_CFLAGS := -O2 '-I$(CURDIR)/include'
test-go: export CGO_LDFLAGS := '-L$(CURDIR)/$(BUILD)/lib' '-Wl,-rpath,$(CURDIR)/$(BUILD)/lib'
test-go: library emulator
	cd bindings/go && test -z "$$(gofmt -l . | tee /dev/stderr)" && go vet ./... && \
	  GOGC=1 GOEXPERIMENT=cgocheck2 LD_LIBRARY_PATH='$(CURDIR)/$(EMULATED)/release' VANWARD_REQUIRE_GPU=1 go test -count=1 -v ./...

# The server on a fake engine and on the tiny model, 50 clients among the tests, under the race detector, with checks of pointers that
# cross into C and of what tensors hold; then the clients without all that, whose memory would hide that of the server.
test-serve: configure
	cmake --build $(BUILD) --parallel $(JOBS) --target vanward-engine-parts
	cd examples/serve && test -z "$$(gofmt -l . | tee /dev/stderr)" && go vet ./... && \
	  VANWARD_CHECK=1 GOEXPERIMENT=cgocheck2 go test -race -count=1 -v ./... && \
	  go test -count=1 -v -run TestSoak .

soak-serve: configure
	cmake --build $(BUILD) --parallel $(JOBS) --target vanward-engine-parts
	cd examples/serve && go test -count=1 -v -run TestSoak -timeout 20m . -soak 10m

# One client at the server beside the engine's own loop, in pairs.
bench-serve: configure
	cmake --build $(BUILD) --parallel $(JOBS) --target vanward-engine
	cd examples/serve && go test -count=1 -v -run TestOneClient -timeout 20m . -engine "$(CURDIR)/$(BUILD)/examples/engine/vanward-engine" \
	  -model "$$(../engine/fetch_model.sh)"

test-python: export VANWARD_CHECK := 1
test-python: export VANWARD_LIBRARY := $(CURDIR)/$(BUILD)/lib/libvanward.so.0
test-python: library $(VENV)/ready
	cd bindings/python && "$(CURDIR)/$(VENV)/bin/python" -m unittest discover -s tests -t . -v
	"$(VENV)/bin/python" -m unittest discover -s examples/forecast -v

$(VENV)/ready:
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check numpy
	touch $@

# README.md, typed by somebody who has just read it.
test-install:
	python3 tests/readme.py $(BUILD)/readme

# The loadable backend for llama.cpp, in unmodified releases of it that npm and apt fetch. What cannot be fetched is skipped with a word.
LLAMA := $(BUILD)/llama
llama: library
	@cmake -S integrations/llama.cpp -B $(LLAMA) -DCMAKE_BUILD_TYPE=Release -DCMAKE_DISABLE_FIND_PACKAGE_Vanward=ON \
	  -DVANWARD_PREBUILT="$(CURDIR)/$(BUILD)/lib"
	cmake --build $(LLAMA) --target llama-tests

test-llama-short: llama emulator
	python3 integrations/llama.cpp/tests/run.py $(LLAMA)

test-llama: export VANWARD_LLAMA_LONG := 1
test-llama: test-llama-short

# The backend with machine code in it, llama.cpp's libraries, the source of ggml-cuda, and a script that compiles it and measures.
LLAMA_BUNDLE ?= $(BUILD)/llama-gpu-bundle
llama-gpu-bundle: packaged
	@$(MAKE) llama
	integrations/llama.cpp/tests/gpu/bundle $(LLAMA_BUNDLE) $(LLAMA)

# The library where the bindings look for it: build/lib.
library: configure
	cmake --build $(BUILD) --target vanward_library

# The library as packages carry it: with machine code beside the PTX, so that no driver compiles 20 s at the first session.
packaged:
	python3 kernels/build.py --assemble
	@$(MAKE) library

# With a test beside it the library has the dependencies' features that `cargo test` gave it, and is not built anew.
ifeq ($(TIER),quick)
configure:
	cargo build --lib --test words --locked
	@cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release -DVANWARD_PREBUILT="$(or $(CARGO_TARGET_DIR),$(CURDIR)/target)/debug"
else
configure:
	@cmake -S . -B $(BUILD) -DCMAKE_BUILD_TYPE=Release
endif

# --- the rest ------------------------------------------------------------------------------------------------------------

# RESULTS=benches/results/<date>-cpu.md also keeps the table.
bench:
	rm -rf $${CARGO_TARGET_DIR:-target}/criterion
	cargo bench --locked --bench '*'
	benches/report.py | tee $(RESULTS)

# The folder to install into; a prefix may be relative and hold spaces.
prefix = "$$(realpath -ms "$(PREFIX)")"

# What lies in a standard folder is found once ldconfig has seen it; for others README.md says how a program finds it.
install: packaged
	DESTDIR="$(DESTDIR)" cmake --install $(BUILD) --prefix $(prefix)
	@if [ -z "$(DESTDIR)" ] && [ "$$(id -u)" = 0 ]; then ldconfig || true; fi

# Installs once more, beside everything, to learn the names.
uninstall: library
	@rm -rf $(BUILD)/uninstall
	@DESTDIR=$(BUILD)/uninstall cmake --install $(BUILD) --prefix $(prefix) >/dev/null
	cd $(BUILD)/uninstall && find . -not -type d -exec sh -c 'for path; do rm -f "$$0/$$path"; done' "$(DESTDIR)" {} +
	@rmdir "$(DESTDIR)"$(prefix)/lib*/cmake/Vanward 2>/dev/null || true
	@find "$(DESTDIR)"$(prefix)/share/doc/vanward -depth -type d -empty -delete 2>/dev/null || true

# One file that pip installs anywhere with as new a glibc: the package, the library and the licences.
wheel: export VANWARD_WHEEL_LIBRARY := $(CURDIR)/$(BUILD)/lib/libvanward.so.0
wheel: packaged $(VENV)/ready
	rm -rf $(BUILD)/wheel
	$(VENV)/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(BUILD)/wheel ./bindings/python
	@ls $(BUILD)/wheel/*.whl

deb: packaged
	cmake -S . -B $(BUILD)/deb -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=/usr -DVANWARD_BUILD_TESTS=OFF \
	  -DVANWARD_PREBUILT="$(CURDIR)/$(BUILD)/lib"
	cmake --build $(BUILD)/deb
	cd $(BUILD)/deb && cpack -G DEB -B "$(CURDIR)/$(BUILD)/packages"

# The contracts from the crate's comments, as vanward.h is, then a page for each of docs. Links between files become links
# between pages, or to the files.
reference: export RUSTDOCFLAGS := --html-in-header docs/reference.html -D warnings
reference: pages := $${CARGO_TARGET_DIR:-target}/doc
reference: files := https://github.com/vanward/vanward/blob/main
reference:
	cargo doc --no-deps --lib --locked
	for page in docs/*.md; do \
	  rustdoc "$$page" --html-in-header docs/reference.html --markdown-no-toc --output "$(pages)" || exit 1; \
	done
	mv "$(pages)/README.html" "$(pages)/index.html"
	mkdir -p "$(pages)/pictures" && cp docs/pictures/*.svg "$(pages)/pictures"
	sed -Ei -e 's|href="\.\./include/vanward\.h"|href="vanward/capi/index.html"|g' -e 's|href="\.\./|href="$(files)/|g' \
	  -e 's|href="README\.md|href="index.html|g' -e 's|(href="[a-z0-9-]+)\.md|\1.html|g' "$(pages)"/*.html

header:
	VANWARD_WRITE_HEADER=1 cargo test --locked --test header

notices:
	VANWARD_WRITE_NOTICES=1 cargo test --locked --test notices

# What the sources assert of their parameters comes from the Rust structs.
kernels:
	VANWARD_WRITE_LAYOUTS=1 cargo test --locked --lib kernels_read_the_parameters
	python3 kernels/build.py

BUNDLE ?= $(BUILD)/gpu-bundle
gpu-bundle:
	tests/gpu/bundle $(BUNDLE)

clean:
	cargo clean
	rm -rf $(BUILD)
