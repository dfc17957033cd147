// Go's net/http with its defaults: whole and streamed, bodies with a length and in chunks, one connection kept.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
)

const body = `{"inputs":"Hi","parameters":{"max_new_tokens":5}}`

func main() {
	for _, path := range []string{"/generate", "/generate_stream"} {
		for _, reader := range []io.Reader{strings.NewReader(body), io.MultiReader(strings.NewReader(body))} {
			response, err := http.Post(os.Args[1]+path, "application/json", reader)
			if err != nil {
				panic(err)
			}
			text, err := io.ReadAll(response.Body)
			if err != nil {
				panic(err)
			}
			fmt.Println(response.StatusCode, strings.Contains(string(text), `"generated_text":"`))
		}
	}
}
