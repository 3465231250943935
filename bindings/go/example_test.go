package vanward_test

import (
	"fmt"
	"log"

	vanward "github.com/vanward/vanward/bindings/go"
)

func ExampleSession_Verify() {
	session, err := vanward.NewSession(vanward.Options{Device: vanward.DeviceCPU})
	if err != nil {
		log.Fatal(err)
	}
	defer session.Close()

	accepted, next := make([]int32, 1), make([]int32, 1)
	err = session.Verify(vanward.VerifyArgs{
		Draft:     vanward.Of([]int32{5, 6, 7}, 1, 3),
		Target:    vanward.Of([]int32{5, 6, 9, 8}, 1, 4),
		Accepted:  vanward.Of(accepted),
		NextToken: vanward.Of(next),
	}, 0)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(accepted[0], "accepted, then", next[0])
	// Output: 2 accepted, then 9
}
