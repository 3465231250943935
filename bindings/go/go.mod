module github.com/vanward/vanward/bindings/go

go 1.24
