module github.com/vanward/vanward/examples/serve

go 1.24
