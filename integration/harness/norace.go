//go:build !race

package harness

// Race tells that the race detector runs, which takes ten times the time and
// memory: what a test measures then says nothing.
const Race = false
