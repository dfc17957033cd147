// The JDK's own client with its defaults: it asks for h2c with every request, body included.
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

public class Post {
    static final String BODY = "{\"inputs\":\"Hi\",\"parameters\":{\"max_new_tokens\":5}}";

    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        BodyPublisher[] bodies = {BodyPublishers.ofString(BODY), inChunks(), BodyPublishers.ofString(BODY)};
        for (String path : new String[] {"/generate", "/generate_stream"})
            for (BodyPublisher body : bodies) {
                var request = HttpRequest.newBuilder(URI.create(args[0] + path)).POST(body);
                var response = client.send(request.header("Content-Type", "application/json").build(), BodyHandlers.ofString());
                System.out.println(response.statusCode() + " " + response.body().contains("\"generated_text\":\""));
            }
    }

    static BodyPublisher inChunks() {
        return BodyPublishers.fromPublisher(BodyPublishers.ofString(BODY));
    }
}
