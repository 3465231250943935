package server

import "testing"

// Whatever a client sends becomes tokens or an error that names a field; nothing panics.
func FuzzRequestBecomesTokensOrAnError(f *testing.F) {
	for _, body := range []string{
		`{"prompt": "a", "max_tokens": 3, "stop": ["x"]}`, `{"prompt": [1, 2, 1e9, -1, null]}`, `{"prompt": null}`, `{"stop": {}}`, `[]`, `{"messages": [null]}`,
		`{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}`, `{"messages": [{"role": "user", "content": [null]}], "stop": "a"}`,
		`{"prompt": "a", "stream_options": {"include_usage": 1}}`, `{"n": 1, "prompt": "\ud800"}`, "\xff", `{"prompt": "a", "prompt": 5}`, `{"": 1}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, form := range []form{textForm, chatForm} {
			fields, err := parse(body, form.fields)
			if err == nil {
				_, err = form.prompt(fakeModel{}, fields)
			}
			if err == nil {
				_, err = fields.stops()
			}
			if err == nil {
				continue
			}
			if failure, is := err.(*failure); !is || failure.status != 400 || failure.Param == nil || failure.Message == "" {
				t.Errorf("%q: %#v", body, err)
			}
		}
	})
}
