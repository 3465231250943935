package cengine

// #include "engine.h"
import "C"

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"
)

// A Model is a model file with its tokenizer, ready for an engine. It implements server.Model.
type Model struct {
	name    string
	tiny    unsafe.Pointer // the bytes of the tiny model
	file    *C.gguf
	threads *C.pool
	model   *C.model
	tokens  *C.tokenizer
	session *C.vwd_session

	count      int // of threads
	context    int
	ends       []int32
	bytes      [][]byte  // of each token
	encodable  [256]bool // bytes that have a token
	vocabulary int
}

// OpenModel reads a GGUF file; an empty path means the tiny random model. Threads 0: one for each processor. The C code says on
// standard error what it does not like about a file.
func OpenModel(path string, threads int) (*Model, error) {
	m := &Model{name: strings.TrimSuffix(filepath.Base(path), ".gguf"), count: threads}
	if path == "" {
		m.name = "tiny"
	}
	if m.count == 0 {
		m.count = runtime.NumCPU()
	}
	if err := m.open(path); err != nil {
		err = fmt.Errorf("model %s: %w", m.name, err)
		m.Close()
		return nil, err
	}
	m.learnTokens()
	return m, nil
}

func (m *Model) open(path string) error {
	if path == "" {
		var size C.size_t
		if m.tiny = C.tiny_gguf(&size); m.tiny != nil {
			m.file = C.gguf_parse(m.tiny, size)
		}
	} else {
		name := C.CString(path)
		defer C.free(unsafe.Pointer(name))
		m.file = C.gguf_open(name)
	}
	if m.file == nil {
		return errors.New("the file cannot be read")
	}
	if m.tokens = C.tokenizer_new(m.file); m.tokens == nil {
		return errors.New("the tokenizer is not one of those that the engine knows")
	}
	if m.threads = C.pool_new(C.int(m.count)); m.threads == nil {
		return fmt.Errorf("%d threads cannot be started", m.count)
	}
	if m.model = C.model_new(m.file, m.threads); m.model == nil {
		return errors.New("the model is not one that the engine knows")
	}
	var why C.batch_error
	if m.session = C.open_session(C.uint32_t(m.count), &why); m.session == nil {
		return errors.New(C.GoString(&why.text[0]))
	}
	shape := C.model_get_shape(m.model)
	m.context, m.vocabulary = int(shape.context), int(shape.vocab)
	return nil
}

// learnTokens asks for each token's bytes, so that decoding needs no call into C, and for the bytes that have no token.
func (m *Model) learnTokens() {
	var buffer [1024]C.char
	m.bytes = make([][]byte, m.vocabulary)
	for id := range m.bytes {
		n := C.tokenizer_decode(m.tokens, C.int32_t(id), &buffer[0], C.size_t(len(buffer)))
		m.bytes[id] = C.GoBytes(unsafe.Pointer(&buffer[0]), C.int(n))
	}
	for b := range m.encodable {
		one := C.char(b)
		m.encodable[b] = C.tokenizer_encode(m.tokens, &one, 1, nil, 0) > 0
	}
	end := C.CString("tokenizer.ggml.eos_token_id")
	defer C.free(unsafe.Pointer(end))
	ends := []int32{int32(C.gguf_int(m.file, end, -1))}
	for _, name := range []string{"<|im_end|>", "<|endoftext|>"} {
		if id, known := m.Control(name); known && id != ends[0] {
			ends = append(ends, id)
		}
	}
	m.ends = ends
}

// Close frees the model. Engines on it are closed before.
func (m *Model) Close() {
	C.vwd_session_release(m.session)
	C.model_free(m.model)
	C.pool_free(m.threads)
	C.tokenizer_free(m.tokens)
	C.gguf_close(m.file)
	C.free(m.tiny)
	*m = Model{}
}

func (m *Model) Name() string    { return m.name }
func (m *Model) Vocabulary() int { return m.vocabulary }
func (m *Model) Context() int    { return m.context }
func (m *Model) End() []int32    { return m.ends }

func (m *Model) Bytes(token int32) []byte { return m.bytes[token] }

func (m *Model) Control(text string) (int32, bool) {
	name := C.CString(text)
	defer C.free(unsafe.Pointer(name))
	id := int32(C.tokenizer_id(m.tokens, name))
	return id, id >= 0
}

func (m *Model) Encode(text string) ([]int32, error) {
	if text == "" {
		return nil, nil
	}
	for at := range len(text) {
		if !m.encodable[text[at]] {
			return nil, fmt.Errorf("byte %#02x at %d has no token in this model", text[at], at)
		}
	}
	ids := make([]int32, len(text)) // a token has at least one byte
	n := C.tokenizer_encode(m.tokens, (*C.char)(unsafe.Pointer(unsafe.StringData(text))), C.size_t(len(text)),
		(*C.int32_t)(unsafe.Pointer(&ids[0])), C.size_t(len(ids)))
	return ids[:n], nil
}
